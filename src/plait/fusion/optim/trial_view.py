"""One trial of a fused optimizer, as torch's learning rate schedulers take an optimizer."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from plait.fusion.errors import FusionError
from plait.fusion.optim.param_groups import FusedGroup


class OfTrials(Protocol):
    """The parts of a fused optimizer that a view of one of its trials needs."""

    kind_name: str
    defaults: dict[str, Any]
    made: list[int]

    @property
    def groups(self) -> Sequence[FusedGroup]: ...

    def trial(self, number: int) -> TrialView: ...


class TrialView(torch.optim.Optimizer):
    """The `param_groups` of one trial, whose hyperparameters are the fused optimizer's.

    A scheduler on it reads and sets the numbers of this trial alone. It follows its trial to another place in
    the array, until the trial leaves or is replaced. Only the fused optimizer takes steps.
    """

    def __init__(self, optimizer: OfTrials, number: int) -> None:
        # Not the base class's: there are no parameters to check, no state and no hooks.
        self._optimizer = optimizer
        self.number: int | None = number
        self.defaults = dict(optimizer.defaults)
        self.param_groups: list[TrialGroup] = [  # type: ignore[assignment]
            TrialGroup(self, group) for group in optimizer.groups
        ]

    @property
    def _opt_called(self) -> bool:
        """Whether a step was taken, which schedulers warn about."""
        return self.number is not None and self._optimizer.made[self.number] > 0

    @_opt_called.setter
    def _opt_called(self, called: bool) -> None:
        """Do nothing: a scheduler sets it around `step`, which raises."""

    def place(self) -> int:
        """The number of the trial in the array."""
        if self.number is None:
            raise FusionError(
                "optimizer.trial: this trial has left the array, or another has taken its place; expected a "
                "scheduler on optimizer.trial(number) of a trial that is there"
            )
        return self.number

    def step(self, closure: Any = None) -> Any:
        raise FusionError("optimizer.trial: all trials take their steps together, by FusedOptimizer.step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        raise FusionError("optimizer.trial: expected FusedOptimizer.zero_grad, which is for all trials")

    def state_dict(self) -> dict[str, Any]:
        raise FusionError(
            "optimizer.trial: expected FusedOptimizer.state_dict, or split_optimizer for one of each trial"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        extra = [{k: v for k, v in group.items() if group.is_own(k)} for group in self.param_groups]
        return type(self._optimizer).trial, (self._optimizer, self.place()), extra

    def __setstate__(self, state: list[dict[str, Any]]) -> None:  # type: ignore[override]
        for group, extra in zip(self.param_groups, state):
            group.update(extra)

    def __repr__(self) -> str:
        return f"TrialView(trial {self.number} of {self._optimizer.kind_name})"


class TrialGroup(UserDict[str, Any]):
    """One trial's values of a group: numbers of the fused one, and what a scheduler adds for itself."""

    def __init__(self, view: TrialView, group: FusedGroup) -> None:
        super().__init__()
        self._view, self._group, self._names = view, group, group.kind.torch_names()
        self.data = {name: group[name] for name in ("params", *group.kind.common, *self._names)}

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._group.of_trial(name, self._view.place())
        return self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._names:
            if self[name] != value:
                self._group.set_trial(self._view.place(), {name: value})
        elif name in self._group.kind.common:
            raise FusionError(
                f"optimizer.trial: {name} is the same for all trials; set it in the fused groups"
            )
        else:
            self.data[name] = value

    def is_own(self, name: str) -> bool:
        """Whether a value is a scheduler's, not the fused group's."""
        return not (name == "params" or name in self._names or name in self._group.kind.common)
