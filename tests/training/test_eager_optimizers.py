"""Workers step with torch's optimizers and import no compiler for it; the steps are those of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# The steps of every optimizer, as they are in this process and in one that has imported no compiler.
STEPS = """
import inspect, torch

def train(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    # It takes matrices alone.
    weights = [model.weight] if kind.__name__ == "Muon" else list(model.parameters())
    optimizer = kind(weights, lr=0.1)
    x = torch.randn(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled()
    return [w.tolist() for w in model.parameters()]

def differentiate():
    weight = torch.tensor(1.0, requires_grad=True)
    changed = weight.clone()
    changed.grad = weight * 2
    optimizer = torch.optim.SGD([weight], lr=0.1, differentiable=True)
    optimizer.param_groups[0]["params"] = [changed]
    optimizer.step()
    return torch.autograd.grad(changed, weight)[0].item()

kinds = [
    kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]
found = [{kind.__name__: train(kind) for kind in kinds}, differentiate()]
"""
WORKER = f"""
import json, sys
import plait.sweeping.worker
import plait.training.worker
from plait.schema.settings import DataSettings, ModelSettings, TrainSettings
from plait.sweeping.trial_settings import array_key
from plait.training.optimizers.eager import use_eager_optimizers

use_eager_optimizers()
{STEPS}
# Which trials can share an array is told from their models, made without memory.
array_key(TrainSettings("t", ModelSettings("plait.workloads.mlp:mlp_tiny"), DataSettings("digits", 8)))
names = "torch._dynamo", "torch._inductor", "sympy"
print(json.dumps([found, [name for name in names if name in sys.modules]]))
"""


def test_workers_step_as_torch_does_and_import_no_compiler():
    command = [sys.executable, "-c", WORKER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    eager, imported = json.loads(done.stdout)
    assert imported == []
    plain: dict[str, Any] = {}
    exec(STEPS, plain)
    assert len(eager[0]) >= 10
    assert eager == plain["found"]
