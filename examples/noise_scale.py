"""The gradient noise scale of a loop: about the largest batch that is still efficient.

torchrun --nproc-per-node 2 examples/noise_scale.py

The squared norms of the workers' gradients are sent with the gradients; one worker has none to compare.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait

world = plait.init("cpu")
torch.manual_seed(0)
x = torch.randn(256, 8, dtype=torch.float64)
y = x.sin().sum(1, keepdim=True) + torch.randn(256, 1, dtype=torch.float64)
model = plait.DataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
noise = plait.GradientNoiseScale(model)
loader = plait.DataLoader(TensorDataset(x, y), batch_size=32)

while loader.epoch < 3:
    for inputs, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        noise.update(samples=32)  # of all workers
        optimizer.step()

if world.is_first:
    print(f"noise scale {noise.value}")
    print(f"loss {nn.functional.mse_loss(model.module(x), y).item():.12f}")
world.close()
