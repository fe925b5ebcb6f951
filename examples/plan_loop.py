"""Measure a model, plan it for the workers there are, and train the plan in a plain loop.

python examples/plan_loop.py
torchrun --nproc-per-node 2 examples/plan_loop.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import plait

world = plait.init("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).double()
x, y = torch.randn(240, 16, dtype=torch.float64), torch.randint(0, 4, (240,))

profile = plait.profile(model, x[:24])
plan = plait.plan(profile, plait.machines(world.world_size, 1e9))  # bytes per second
if world.is_first:
    print(f"measured {profile.model}; stages: {[len(stage.layers) for stage in plan.stages]}")

pipe = plait.Pipeline(
    model,
    plan,  # rank 0's
    example_inputs=(x[:24],),
    loss=F.cross_entropy,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    schedule="flush",
)
for batch in torch.arange(len(x)).split(24):
    loss = pipe.step(x[batch], y[batch])
if world.is_first:
    print(f"loss {loss:.12f}")
pipe.close()
world.close()
