"""One script for every way to start it: trains a small model and saves its weights.

    python five_ways.py --out weights.safetensors
    torchrun --nproc-per-node 2 five_ways.py --out weights.safetensors

Whoever starts its processes, and however many there are, the weights are equal to 1e-10. `JOB` is the same
training as a job file, which names this module: `plait train`, and `plait.worker` in pods, come to them, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

EPOCHS, BATCH_SIZE, LR, MOMENTUM, SEED = 3, 10, 0.05, 0.9, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def make_data(split: str = "train") -> TensorDataset:
    """Samples whose last batch is smaller and cannot be shared evenly."""
    x = torch.randn(45, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().unflatten(1, (2, 3)).sum(2))


JOB: dict[str, Any] = {
    "name": "five-ways",
    "model": "five_ways:make_model",
    "data": {"kind": "five_ways:make_data", "batch_size": BATCH_SIZE},
    "loss": "mse",
    "optimizer": {"kind": "sgd", "lr": LR, "momentum": MOMENTUM},
    "epochs": EPOCHS,
    "seed": SEED,
    "precision": "float64",
    "device": "cpu",
}


def train() -> dict[str, Tensor] | None:
    """The weights after training, in the process of rank 0; None in the others."""
    with plait.init("cpu") as world:
        model = plait.DataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        loader = plait.DataLoader(make_data(), BATCH_SIZE, seed=SEED)
        while loader.epoch < EPOCHS:
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        print(f"{world.launcher}: rank {world.rank} of {world.world_size}")
        return model.state_dict() if world.is_first else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="the safetensors file to write the weights to")
    asked = parser.parse_args(arguments)
    weights = train()
    if weights is not None:
        save_file(weights, asked.out)


if __name__ == "__main__":
    main()
