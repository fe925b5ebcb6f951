"""A parameter group of fused trials: hyperparameters with one value per trial, and step counts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.names import did_you_mean
from plait.fusion.errors import FusionError
from plait.fusion.optim.optimizer_kinds import KINDS, OptimizerKind
from plait.fusion.trials.per_trial import Number, PerTrial, one_each


@dataclass
class StepClock:
    """The step counts, one per trial, of parameters that were always updated together.

    A parameter without a gradient is not updated, so its bias correction starts later. `pushes` counts the
    steps with momentum, the first of which fills the buffer.
    """

    steps: Tensor
    pushes: Tensor

    @classmethod
    def new(cls, trials: int, device: torch.device) -> StepClock:
        return cls(*(torch.zeros(trials, dtype=torch.float32, device=device) for _ in range(2)))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StepClock:
        return StepClock(change(self.steps), change(self.pushes))

    def advance(self, moving: Tensor | None, momentum: Tensor | None) -> None:
        self.steps += 1.0 if moving is None else moving
        if momentum is not None:
            pushed = momentum != 0
            self.pushes += pushed if moving is None else pushed & moving


class FusedGroup(dict[str, Any]):
    """One of an optimizer's `param_groups`, with torch's names; values may differ between trials.

    A hyperparameter can be set to one float or to one per trial. It reads as a float or as a `PerTrial`,
    which schedulers can use like a float. Setting it copies it to the device, so that a captured step uses
    it.
    """

    def __init__(self, kind: str, trials: int, device: torch.device) -> None:
        super().__init__()
        self.kind_name = kind
        self.trials = trials
        self.device = device
        # The trials' values of each hyperparameter, also on the device; in float64, since 1 - beta ** step
        # loses digits in float32.
        self.numbers: dict[str, list[float]] = {}
        self.vectors: dict[str, Tensor] = {}
        # The clock of each parameter that was, or could have been, updated; and each clock once.
        self._clock_of: dict[Tensor, StepClock] = {}
        self._clocks: list[StepClock] = []
        # The parameters when clocks were last added.
        self._with_clock: list[Tensor] = []

    @property
    def kind(self) -> OptimizerKind:
        return KINDS[self.kind_name]

    @property
    def switches(self) -> dict[str, bool]:
        """The boolean options, which are the same for all trials."""
        return {name: bool(self[name]) for name in self.kind.common}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of a parameter's state tensors, given the current hyperparameters."""
        return tuple(self.kind.states(self.numbers, self.switches))

    @property
    def clocks(self) -> list[StepClock]:
        self._add_clocks()
        return self._clocks

    def __setitem__(self, name: str, value: Any) -> None:
        if "numbers" not in self.__dict__:  # while unpickling
            super().__setitem__(name, value)
        elif name == "betas" and "beta1" in self.kind.hyperparameters:
            pairs = _split_betas(value)
            betas = tuple(self._set("betas", f"beta{index}", one) for index, one in enumerate(pairs, 1))
            super().__setitem__(name, betas)
        elif name in self.kind.hyperparameters:
            super().__setitem__(name, self._set(name, name, value))
        else:
            super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def _set(self, torch_name: str, name: str, value: Number) -> float:
        values = one_each(torch_name, value, self.trials)
        vector = torch.tensor(values, dtype=torch.float64)
        if name in self.vectors:
            self.vectors[name].copy_(vector)
        else:
            self.vectors[name] = vector.to(self.device)
        self.numbers[name] = values
        return values[0] if len(set(values)) == 1 else PerTrial(values)

    def set_trial(self, number: int, values: Mapping[str, Any]) -> None:
        """Set hyperparameters of one trial, under torch's names."""
        for name, value in values.items():
            names, values_given = (("beta1", "beta2"), value) if name == "betas" else ((name,), (value,))
            every = [list(self.numbers[one]) for one in names]
            for numbers, given in zip(every, values_given):
                numbers[number] = given
            self[name] = tuple(map(PerTrial, every)) if name == "betas" else every[0]

    def clocks_for(self, parameters: Sequence[Tensor], absent: Sequence[tuple[int, ...]]) -> list[StepClock]:
        """The clocks of `parameters`, which are updated now except for the trials that are `absent`.

        Parameters that were updated together until now and no longer are get separate clocks.
        """
        clocks = self.clocks
        if len(clocks) == 1 and len(parameters) == len(self._clock_of) and not any(absent):
            return clocks * len(parameters)
        absent_of = dict(zip(parameters, absent))
        for clock in clocks:
            members = [parameter for parameter, other in self._clock_of.items() if other is clock]
            kinds = list(dict.fromkeys(absent_of.get(parameter) for parameter in members))
            for kind in kinds[1:]:
                apart = [parameter for parameter in members if absent_of.get(parameter) == kind]
                self._set_clocks(dict.fromkeys(apart, clock.mapped(torch.clone)))
        return [self._clock_of[parameter] for parameter in parameters]

    def _set_clocks(self, clocks: Mapping[Tensor, StepClock], all_of_them: bool = False) -> None:
        self._clock_of = {**({} if all_of_them else self._clock_of), **clocks}
        self._clocks = distinct(self._clock_of.values())

    def _add_clocks(self) -> None:
        parameters = self["params"]
        known = self._with_clock
        if len(parameters) != len(known) or not all(map(operator.is_, parameters, known)):
            new = [parameter for parameter in parameters if parameter not in self._clock_of]
            if new:
                self._set_clocks(dict.fromkeys(new, StepClock.new(self.trials, self.device)))
            self._with_clock = list(parameters)

    def replace(self, others: Mapping[Tensor, Tensor]) -> None:
        """Hold other parameters in the place of some."""
        if any(parameter in others for parameter in self["params"]):
            self["params"] = [others.get(parameter, parameter) for parameter in self["params"]]
            self._set_clocks({others.get(p, p): clock for p, clock in self._clock_of.items()}, True)
            self._with_clock = [others.get(p, p) for p in self._with_clock]

    def counts(self, parameter: Tensor) -> StepClock:
        """How many times each trial of a parameter was updated."""
        self._add_clocks()
        return self._clock_of[parameter]

    def set_counts(self, counts: Mapping[Tensor, tuple[list[float], list[float]]]) -> None:
        """Set how many times each parameter was updated; parameters with equal counts share a clock."""
        known: dict[Any, StepClock] = {}
        clocks: dict[Tensor, StepClock] = {}
        for parameter, (steps, pushes) in counts.items():
            key = (*steps, None, *pushes)
            if key not in known:
                tensors = (torch.tensor(part, dtype=torch.float32) for part in (steps, pushes))
                known[key] = StepClock(*(tensor.to(self.device) for tensor in tensors))
            clocks[parameter] = known[key]
        self._set_clocks(clocks)

    def forget(self, number: int) -> None:
        """Reset the steps of a trial."""
        for clock in self.clocks:
            clock.steps[number] = clock.pushes[number] = 0.0

    def rewrite(self, change: Callable[[Tensor], Tensor], numbers: Sequence[int]) -> None:
        """Select the trials `numbers`, in this order; `change` does the same to a tensor."""
        # Parameters that share a clock continue to.
        changed = {id(clock): clock.mapped(change) for clock in self.clocks}
        self.trials = len(numbers)
        self._set_clocks({parameter: changed[id(clock)] for parameter, clock in self._clock_of.items()})
        self.vectors = {}
        after: dict[str, Any] = {
            name: PerTrial([values[number] for number in numbers]) for name, values in self.numbers.items()
        }
        self.update(_with_pair(after))


def distinct(clocks: Iterable[StepClock]) -> list[StepClock]:
    """Each clock once."""
    every = list(clocks)
    return list(dict(zip(map(id, every), every)).values())


def _split_betas(betas: Any) -> tuple[Any, Any]:
    """The two `betas`, from a pair (each a float or one per trial) or from one pair per trial."""
    if isinstance(betas[0], (tuple, list)):
        return [pair[0] for pair in betas], [pair[1] for pair in betas]
    return betas[0], betas[1]


def _with_pair(numbers: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters under torch's names."""
    if "beta1" not in numbers:
        return numbers
    others = {name: value for name, value in numbers.items() if name not in ("beta1", "beta2")}
    return {**others, "betas": (numbers["beta1"], numbers["beta2"])}


def check_options(name: str, options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise for options that this optimizer does not have."""
    kind = KINDS[name]
    valid = [*torch_names(kind), *kind.hyperparameters, *kind.common, *also]
    for option in options:
        if option not in valid:
            raise FusionError(f"optimizer: {name} takes no {option!r}{did_you_mean(option, valid)}")


def torch_names(kind: OptimizerKind) -> dict[str, Any]:
    """The hyperparameters of an optimizer kind under torch's names, with torch's defaults."""
    return _with_pair(dict(kind.hyperparameters))
