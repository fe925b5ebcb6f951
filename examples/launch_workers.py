"""Workers for a function of a script or a notebook: python examples/launch_workers.py"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait


def train(epochs: int) -> float:
    """The loss after training; every worker calls it."""
    with plait.init("cpu"):
        torch.manual_seed(0)
        x = torch.randn(100, 8, dtype=torch.float64)
        data = TensorDataset(x, x.square().sum(1, keepdim=True))
        model = plait.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = plait.DataLoader(data, batch_size=12)
        while loader.epoch < epochs:
            for inputs, target in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), target).backward()
                optimizer.step()
        return nn.functional.mse_loss(model.module(x), data[:][1]).item()


if __name__ == "__main__":
    for workers in (1, 2):
        losses = plait.launch(train, 3, workers=workers)
        print(f"{workers} workers: loss {losses[0]:.12f}")
