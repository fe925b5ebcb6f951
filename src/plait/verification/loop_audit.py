"""The audit of a step in a user's training loop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from plait.comm.collectives import all_gather_values
from plait.core.errors import PlaitError
from plait.verification.audit import (
    ObservedStep,
    Replay,
    Rounding,
    changed_tensors,
    sum_over_workers,
)
from plait.verification.observe import RandomState, unchanged_random_numbers
from plait.verification.python_state import unchanged_state
from plait.verification.replay import Part, PlainModel
from plait.verification.twin import MakeOptimizer, OptimizerTwin


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit: `differences` beyond rounding, as text, and the largest difference.

    `largest_difference` is relative to the largest value of the same kind. `unseen` names attributes that
    cannot be read; if forward depends on them, differences mean nothing.
    """

    largest_difference: float
    differences: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the step equals that of plain PyTorch, up to rounding."""
        return not self.differences

    def check(self) -> None:
        """Raise PlaitError with the differences, if there are any."""
        if self.differences:
            raise PlaitError(str(self))

    def __str__(self) -> str:
        if not self.differences:
            return f"the step is what plain PyTorch does, largest difference {self.largest_difference:.1g}"
        unseen = (
            f"; forward may depend on {', '.join(self.unseen)}, which cannot be read" if self.unseen else ""
        )
        return f"the step is not what plain PyTorch does: {'; '.join(self.differences)}{unseen}"


def audit(
    step: Callable[[], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
    *,
    make_model: Callable[[], nn.Module] | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> AuditReport:
    """Take one step of a training loop, repeat it in plain PyTorch, and compare the two.

    `step()` is the loop's step: it computes the gradients of `loss(model(inputs), target)` for `batch`, which
    is `(inputs, target)`, and calls `optimizer.step()` once. Training continues from its result. The
    repetition is forward, backward and update of a model that `make_model` builds, by default a copy, with
    the state and the random numbers from before the step. If torch.distributed is initialized, all ranks call
    it together, each with its own batch, and gradients are averaged, as in DistributedDataParallel.
    """
    live = PlainModel(_unwrapped(model), loss)
    before, random_state = live.state().copied(), RandomState.now()
    part = Part(*batch, random_state=random_state).copied()
    names: dict[Tensor, str] = {parameter: name for name, parameter in live.parameters().items()}
    twin = OptimizerTwin(optimizer, names, make_optimizer or _remade(optimizer), lambda _: None)
    try:
        step()
    finally:
        twin.close()
    if twin.updates != 1:
        raise PlaitError(f"audit: found {twin.updates} calls of optimizer.step() in the step, expected one")
    state = live.state()
    frozen = {name: state.tensors[name] for name in live.parameters() if name not in twin.gradients}
    observed = ObservedStep(
        torch.zeros(()),
        twin.gradients,
        {name: state.tensors[name] for name in live.buffers()},
        {**changed_tensors(before.tensors, frozen), **twin.written},
        state.attributes.values,
    )
    with unchanged_random_numbers(), unchanged_state(live.objects):
        plain = (make_model or (lambda: copy.deepcopy(live.model)))()
        replay = Replay(PlainModel(plain, loss), before, [part], _mean_over_ranks)
        largest, differences = replay.compare(observed, Rounding(), set(), _any_rank)
        differences += twin.differences()
    return AuditReport(largest, tuple(map(str, differences)), before.attributes.unseen)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _remade(optimizer: torch.optim.Optimizer) -> MakeOptimizer:
    """A function that makes an optimizer of the same class and options for other parameters."""

    def make(parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
        rest = iter(parameters)
        groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": [next(rest) for _ in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        return type(optimizer)(groups, **options)

    return make


def _any_rank(flag: bool) -> bool:
    return any(all_gather_values(flag)) if _in_world() else flag


def _in_world() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _mean_over_ranks(loss: Tensor, parameters: Sequence[Parameter]) -> Tensor:
    """Average the gradients over all ranks; the loss is not compared."""
    if _in_world():
        sum_over_workers(loss, parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())
    return torch.zeros(())
