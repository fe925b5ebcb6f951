"""A model in pipeline stages, in a plain training loop.

python examples/pipeline_loop.py
torchrun --nproc-per-node 2 examples/pipeline_loop.py
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

pipe = plait.Pipeline(
    model,
    world.world_size,  # a stage for each worker
    example_inputs=(x[:24],),
    loss=F.cross_entropy,
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    microbatches=4,
)
for epoch in range(3):
    for batch in torch.arange(len(x)).split(24):
        loss = pipe.step(x[batch], y[batch])
    if world.is_first:
        print(f"epoch {epoch}: loss {loss:.12f}")

state = pipe.state_dict()  # by name, on rank 0
if world.is_first:
    print(f"stages: {pipe.stages}; {len(state)} tensors")
pipe.close()
world.close()
