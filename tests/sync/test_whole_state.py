"""What workers average when they synchronize: the optimizer's whole state, also of one that took no step."""

from __future__ import annotations

from typing import Any

import torch

from plait.sync.averaging.optimizer_state import Counters, OptimizerState
from support.simulated import DictStore


def optimizer_with_state(steps: int, used: tuple[int, ...] = (0, 1)) -> tuple[list[Any], torch.optim.Adam]:
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adam(weights)
    for _ in range(steps):
        for number in used:
            weights[number].grad = torch.ones_like(weights[number])
        optimizer.step()
    return weights, optimizer


def test_workers_that_took_other_steps_have_the_same_tensors_to_average():
    store: Any = DictStore()
    found = [
        OptimizerState(store, "o", *optimizer_with_state(*given)) for given in ((0,), (2, (0,)), (3, (1,)))
    ]
    for state in found:
        state.prepare()
    shapes = [[(tensor.dtype, tensor.shape) for tensor in state()] for state in found]
    assert len(shapes[0]) == 6
    assert shapes[0] == shapes[1] == shapes[2]
    assert [float(tensor.sum()) for tensor in found[0]()] == [0.0] * 6
    # Asked again, they are the tensors that the optimizer keeps.
    for tensor in found[0]():
        tensor.fill_(1.0)
    assert all(float(value.min()) == 1.0 for value in found[0]())


def test_counters_and_the_loss_scale_become_the_mean():
    norm = torch.nn.BatchNorm1d(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    counters = Counters(list(norm.buffers()), scaler)
    norm.num_batches_tracked.fill_(5)
    counters.prepare()
    (numbers,) = counters()
    assert numbers.tolist() == [5.0, 1024.0, 0.0]
    numbers.copy_(torch.tensor([6.6, 512.0, 3.2]))
    counters.finish()
    assert int(norm.num_batches_tracked) == 7
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (512.0, 3)
    nothing = Counters([], torch.amp.GradScaler("cpu", enabled=False))
    nothing.prepare()
    assert nothing() == []
    nothing.finish()
