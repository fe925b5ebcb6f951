"""Is the step of a loop what plain PyTorch does? The first step is taken twice and compared.

python examples/audit_loop.py                    torchrun --nproc-per-node 2 examples/audit_loop.py
"""

from functools import partial

import torch
from torch import nn

import plait

world = plait.init("cpu")
torch.manual_seed(0)
x = torch.randn(128, 8, dtype=torch.float64)
y = x.sin().sum(1, keepdim=True)
model = plait.DataParallel(net := nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_of = nn.MSELoss()


def step(inputs: torch.Tensor, target: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(inputs), target).backward()
    optimizer.step()


for number, batch in enumerate(torch.arange(len(x)).split(32)):
    share = batch[world.rank :: world.world_size]
    if number == 0:
        samples = x[share], y[share]
        report = plait.audit(partial(step, *samples), net, optimizer, loss_of, samples)
        report.check()  # raises with what differs
    else:
        step(x[share], y[share])

if world.is_first:
    print(f"{report}\nloss {loss_of(net(x), y).item():.12f}")
world.close()
