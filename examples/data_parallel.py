"""Train with any number of workers; what was stopped goes on in mid-epoch, also with another number of them.

python examples/data_parallel.py                    torchrun --nproc-per-node 2 examples/data_parallel.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait

world = plait.init()
path = Path(sys.argv[1] if len(sys.argv) > 1 else "data_parallel.pt")
torch.manual_seed(0)
x = torch.randn(101, 8, dtype=torch.float64)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
model = plait.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = plait.DataLoader(data, batch_size=12)  # 12 over all workers
saved: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
if path.exists():
    for name, state in torch.load(path).items():
        saved[name].load_state_dict(state)

while loader.epoch < 5:
    for step, (inputs, target) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        if world.is_first and step % 4 == 3:
            torch.save({name: each.state_dict() for name, each in saved.items()}, path)

if world.is_first:
    with torch.no_grad():
        print(f"loss {nn.functional.mse_loss(model(x), data[:][1]).item():.15f}")
