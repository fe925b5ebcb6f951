"""A plain loop whose workers average their weights after each step.

python examples/averaging_loop.py
torchrun --nproc-per-node 2 examples/averaging_loop.py

The mean of the weights after one step of SGD each is one step on all their samples, so both print the same
loss. With every=8, or with "partial-reduce", "ad-psgd" or "diloco", workers wait for each other less.
"""

import torch
from torch import nn

import plait

world = plait.init()
torch.manual_seed(0)
x = torch.randn(256, 8, dtype=torch.float64)
y = x.sin().sum(1, keepdim=True)
x, y = x.to(world.device), y.to(world.device)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double().to(world.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_of = nn.MSELoss()

with plait.Averaging(model, optimizer, "local-sgd", every=1):
    for _ in range(5):
        for batch in torch.arange(len(x)).split(32):
            share = batch[world.rank :: world.world_size]  # the samples of this worker
            optimizer.zero_grad()
            loss_of(model(x[share]), y[share]).backward()
            optimizer.step()

if world.is_first:
    print(f"loss {loss_of(model(x), y).item():.12f}")
world.close()
