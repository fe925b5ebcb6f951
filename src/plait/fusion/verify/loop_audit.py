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
from torch.utils import _pytree as pytree

from plait.comm.collectives import all_gather_values
from plait.core.errors import PlaitError
from plait.fusion.module import FusedModule
from plait.fusion.optim.conversion import trial_optimizer
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.fusion.shared_input import Shared
from plait.fusion.verify.plain_run import drawing_as
from plait.verification.audit import Replay, Rounding, largest_difference, observe_live, sum_over_workers
from plait.verification.compare import Noise, find_differences, measure_noise, perturb_in_place
from plait.verification.observe import Observation, RandomState, unchanged_random_numbers
from plait.verification.optimizer_load import load_state_dict
from plait.verification.python_state import unchanged_state
from plait.verification.reference_optimizer import MakeOptimizer, OptimizerTwin, after_update
from plait.verification.replay import Part, PlainModel
from plait.verification.restored_state import borrowed


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit: `differences` beyond rounding, as text, and the largest difference.

    `largest_difference` is relative to the largest value of the same kind. `unseen` names attributes that
    cannot be read; if forward depends on them, differences mean nothing.

    Examples:
        ```python
        report = plait.AuditReport(largest_difference=3e-16)
        report.check()  # raises PlaitError if there are differences
        ```
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
    the state and the random numbers from before the step. `make_optimizer` makes its optimizer of the
    parameters, by default one of the same class and options. If torch.distributed is initialized, all ranks
    call it together, each with its own batch, and gradients are averaged, as in DistributedDataParallel.

    Of a fused module with its FusedOptimizer, each trial's step is repeated with the trial alone; `loss` is
    that of one trial, and tensors of `batch` have the trials axis first or are Shared.

    Examples:
        ```python
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(16, 8), torch.randn(16, 1)


        def step():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


        plait.audit(step, model, optimizer, nn.functional.mse_loss, (x, y)).check()
        ```
    """
    if isinstance(model, FusedModule):
        if make_model is not None or make_optimizer is not None:
            raise PlaitError(
                "audit: found make_model or make_optimizer with a fused module, expected neither"
            )
        return _audit_trials(step, model, optimizer, loss, batch)
    live = PlainModel(_unwrapped(model), loss)
    before, random_state = live.state().copied(), RandomState.now()
    part = Part(*batch, random_state=random_state).copied()
    names: dict[Tensor, str] = {parameter: name for name, parameter in live.parameters().items()}
    twin = OptimizerTwin(optimizer, names, make_optimizer or _remade(optimizer), lambda _: None)
    try:
        step()
    finally:
        twin.close()
    _check_updates(twin.updates)
    observed = observe_live(live, before, twin, torch.zeros(()))
    with unchanged_random_numbers(), unchanged_state(live.objects):
        plain = (make_model or (lambda: copy.deepcopy(live.model)))()
        replay = Replay(PlainModel(plain, loss), before, [part], _mean_over_ranks)
        largest, differences = replay.compare(observed, Rounding(), set(), _any_rank)
        differences += twin.differences()
    return AuditReport(largest, tuple(map(str, differences)), before.attributes.unseen)


def _audit_trials(
    step: Callable[[], Any],
    fused: FusedModule,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], Tensor],
    batch: tuple[Any, Any],
) -> AuditReport:
    """Take one step of a fused module, repeat it with each trial that has steps left, and compare."""
    if not isinstance(optimizer, FusedOptimizer) or optimizer.fused is not fused:
        raise PlaitError(
            f"audit: found a fused module with {type(optimizer).__name__}, expected its FusedOptimizer"
        )
    if _in_world():
        raise PlaitError(
            f"audit: found a fused module on {dist.get_world_size()} ranks, expected a process by itself"
        )
    alone = [
        _TrialAlone(optimizer, trial, loss, batch)
        for trial in range(fused.trials)
        if trial not in fused.frozen
    ]
    updates = list[None]()
    hook = optimizer.register_step_post_hook(lambda *_: updates.append(None))
    try:
        step()
    finally:
        hook.remove()
    _check_updates(len(updates))
    largest, differences = 0.0, list[str]()
    with unchanged_random_numbers():
        for each in alone:
            expected, observed = each.take(), each.observe()
            if find_differences(expected, observed, Noise({})):
                noise = measure_noise(expected, each.take)
                found = find_differences(expected, observed, noise)
                differences += [f"trial {each.trial}: {difference}" for difference in found]
            largest = max(largest, largest_difference(expected, observed))
    return AuditReport(largest, tuple(differences))


class _TrialAlone:
    """A copy of a fused trial and its optimizer before a step, which takes the step any number of times."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        trial: int,
        loss: Callable[[Any, Any], Tensor],
        batch: tuple[Any, Any],
    ) -> None:
        self.trial = trial
        self._fused, self._optimizer = optimizer.fused, optimizer
        self._model = self._fused.trial(trial)
        self._state = trial_optimizer(optimizer, self._model, trial).state_dict()
        self._rng_step = int(self._fused.ages[trial])
        self._loss = loss
        self._part = Part(*pytree.tree_map(self._of_trial, batch)).copied()

    def _of_trial(self, leaf: Any) -> Any:
        if isinstance(leaf, Shared):
            return leaf.tensor
        return leaf[self.trial] if isinstance(leaf, Tensor) else leaf

    def take(self, seed: int | None = None) -> Observation:
        """The result of the step; with a `seed`, from perturbed weights."""
        fused, model = self._fused, self._model
        with borrowed(model, self._loss):
            if seed is not None:
                perturb_in_place(model.parameters(), seed)
            single = trial_optimizer(self._optimizer, model, self.trial)
            load_state_dict(single, copy.deepcopy(self._state))
            with drawing_as(model, int(fused.stream_seeds[self.trial]), self._rng_step, fused.unfused):
                PlainModel(model, self._loss).step([self._part])
            if self._optimizer.clip_norm is not None:
                limit = float(self._optimizer.clip_norm[self.trial])
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            single.step()
            return _left_by_step(model, single)

    def observe(self) -> Observation:
        """The trial as the fused step has left it."""
        model = self._fused.trial(self.trial)
        return _left_by_step(model, trial_optimizer(self._optimizer, model, self.trial))


def _left_by_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Observation:
    """Weights, buffers and the optimizer's state after a step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    buffers = {f"the buffer {name}": buffer.detach() for name, buffer in model.named_buffers()}
    return {**after_update(optimizer, names), **buffers}


def _check_updates(updates: int) -> None:
    if updates != 1:
        raise PlaitError(f"audit: found {updates} calls of optimizer.step() in the step, expected one")


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
