"""Train while workers come, go and are killed; the weights are those of one process.

python examples/elastic_loop.py                    plait run -np 3 examples/elastic_loop.py 0.5
While it runs: kill -9 a worker (plait status elastic_loop shows their pids), or plait resize elastic_loop 4.
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import plait

world = plait.init()
torch.manual_seed(0)
x = torch.randn(101, 8, dtype=torch.float64)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
model = plait.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loader = plait.DataLoader(data, batch_size=12)  # 12 over all workers
elastic = plait.Elastic(model, optimizer, loader=loader, scheduler=scheduler)

while loader.epoch < 5:
    for inputs, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)  # time to kill somebody

elastic.finish()
if world.is_first:
    for change in elastic.changes:
        print(f"step {change.step}: now workers {change.members}, after {change.seconds:.2f} s")
    print(f"loss {nn.functional.mse_loss(model(x), data[:][1]).item():.15f}")
