"""Workers step with torch's optimizers and import no compiler for it; the steps are those of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SCRIPT = """
import inspect, json, sys, torch
import plait.sweeping.worker
import plait.training.worker
from plait.schema.settings import DataSettings, ModelSettings, TrainSettings
from plait.sweeping.trial_settings import array_key
from plait.training.optimizers.eager import use_eager_optimizers

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
use_eager_optimizers()
eager = {kind.__name__: train(kind) for kind in kinds}, differentiate()
# Which trials can share an array is told from their models, made without memory.
array_key(TrainSettings("t", ModelSettings("plait.workloads.mlp:mlp_tiny"), DataSettings("digits", 8)))
imported = sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
import torch._dynamo
plain = {kind.__name__: train(kind) for kind in kinds}, differentiate()
print(json.dumps({"imported": imported, "eager": eager, "plain": plain}))
"""


def test_workers_step_as_torch_does_and_import_no_compiler():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["imported"] == []
    assert len(seen["eager"][0]) >= 10
    assert seen["eager"] == seen["plain"]
