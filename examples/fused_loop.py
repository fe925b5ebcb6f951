"""Four learning rates in one loop: each worker trains its share of the trials as one fused model.

python examples/fused_loop.py
torchrun --nproc-per-node 2 examples/fused_loop.py
"""

import torch
from torch import nn

import plait

RATES = [0.3, 0.1, 0.03, 0.01]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)).double()


world = plait.init("cpu")
rates = RATES[world.rank :: world.world_size]
fused = plait.fuse([make_model() for _ in rates])
optimizer = plait.FusedOptimizer(fused, "sgd", lr=rates, momentum=0.9)
x = torch.randn(192, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
y = (x[:, :3] + x[:, 3:6]).argmax(1)

for batch in torch.arange(len(x)).split(32):
    optimizer.zero_grad()
    outputs = fused(plait.Shared(x[batch]))  # the same samples for all trials
    losses = fused.map(nn.functional.cross_entropy, outputs, plait.Shared(y[batch]))
    losses.sum().backward()
    optimizer.step()

for rate, loss in zip(rates, losses.tolist()):
    print(f"lr {rate}: loss {loss:.12f}")
models = fused.split()  # plain models again
world.close()
