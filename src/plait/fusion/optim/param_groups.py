"""A parameter group of fused trials: hyperparameters with one value per trial, and step counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.core.names import did_you_mean
from plait.fusion.dispatch.per_trial import Number, PerTrial, one_each
from plait.fusion.errors import FusionError
from plait.fusion.optim.kind import OptimizerKind
from plait.fusion.optim.optimizer_kinds import KINDS
from plait.fusion.optim.step_clock import StepClock, distinct
from plait.sync.weight_ema import EMA

# The numbers that schedulers add to a group.
OF_SCHEDULERS = (
    "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "initial_momentum",
)  # fmt: skip


class FusedGroup(dict[str, Any]):
    """One of an optimizer's `param_groups`, with torch's names; values may differ between trials.

    A hyperparameter can be set to one float or to one per trial. It reads as a float or as a `PerTrial`,
    which schedulers can use like a float. Setting it copies it to the device, so that a captured step uses
    it.
    """

    def __init__(
        self, kind: str, trials: int, device: torch.device, dtype: torch.dtype, keeps_ema: bool
    ) -> None:
        super().__init__()
        self.kind_name = kind
        self.trials = trials
        self.device = device
        self.dtype = dtype
        self.keeps_ema = keeps_ema
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
    def switches(self) -> dict[str, Any]:
        """The options that are the same for all trials."""
        return {name: self[name] for name in self.kind.common}

    def state_names(self, dims: int) -> tuple[str, ...]:
        """The names of the states of a parameter with `dims` axes, given the current hyperparameters."""
        names = self.kind.states(self.numbers, self.switches, dims - 1)
        return (*names, EMA) if self.keeps_ema else tuple(names)

    def first_state(self, parameter: Tensor, name: str) -> Tensor:
        """A state of a parameter before its first step."""
        if name == EMA:
            return parameter.detach().clone()
        return self.kind.first_state(self.vectors, parameter, name)

    @property
    def clocks(self) -> list[StepClock]:
        self._add_clocks()
        return self._clocks

    def __setitem__(self, name: str, value: Any) -> None:
        if "numbers" not in self.__dict__:  # while unpickling
            super().__setitem__(name, value)
        elif name in self.kind.tuples:
            parts = zip(self.kind.tuples[name], _split(value))
            super().__setitem__(name, tuple(self._set(name, part, one) for part, one in parts))
        elif name in self.kind.hyperparameters:
            super().__setitem__(name, self._set(name, name, value))
        else:
            common = self.kind.common
            if name in OF_SCHEDULERS and isinstance(value, list) and len(value) == self.trials:
                value = PerTrial(value)  # from a saved state
            super().__setitem__(name, as_switch(common[name], value) if name in common else value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def _set(self, torch_name: str, name: str, value: Number | None) -> float:
        values = one_each(torch_name, self._number(torch_name, name, value), self.trials)
        if any(map(math.isnan, values)):
            raise FusionError(f"optimizer: found {torch_name} = {values}, expected numbers")
        vector = torch.tensor(values, dtype=torch.float64)
        if name in self.vectors:
            self.vectors[name].copy_(vector)
        else:
            self.vectors[name] = vector.to(self.device)
        self.numbers[name] = values
        return values[0] if len(set(values)) == 1 else PerTrial(values)

    def _number(self, torch_name: str, name: str, value: Any) -> Any:
        """`value`, with what torch takes for None in its place."""
        if isinstance(value, (list, tuple)):
            return [self._number(torch_name, name, one) for one in value]
        if value is None and name not in self.kind.unset:
            raise FusionError(f"optimizer: found {torch_name} = None, expected a number, or one per trial")
        return self.kind.unset[name](self.dtype) if value is None else value

    def of_trial(self, name: str, number: int) -> Any:
        """A hyperparameter of one trial, under torch's name."""
        parts = self.kind.tuples.get(name)
        if parts is not None:
            return tuple(self.numbers[part][number] for part in parts)
        return self.numbers[name][number]

    def set_trial(self, number: int, values: Mapping[str, Any]) -> None:
        """Set hyperparameters of one trial, under torch's names."""
        for name, value in values.items():
            every = [self.of_trial(name, other) for other in range(self.trials)]
            every[number] = value
            self[name] = every

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

    def begin_anew(self, parameters: Sequence[Tensor]) -> None:
        """Count from the start for parameters without a state, as where its user has cleared it."""
        if parameters:
            self._add_clocks()
            self._set_clocks(dict.fromkeys(parameters, StepClock.new(self.trials, self.device)))

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

    def set_counts(self, counts: Mapping[Tensor, Sequence[list[float]]]) -> None:
        """Set the counts of each parameter, as rows of a clock; parameters with equal ones share a clock."""
        known: dict[Any, StepClock] = {}
        clocks: dict[Tensor, StepClock] = {}
        for parameter, rows in counts.items():
            key = tuple(map(tuple, rows))
            if key not in known:
                known[key] = StepClock.of(*rows, device=self.device)
            clocks[parameter] = known[key]
        self._set_clocks(clocks)

    def forget(self, number: int) -> None:
        """Reset the steps of a trial."""
        for clock in self.clocks:
            clock.steps[number] = clock.pushes[number] = 0.0
            clock.mu_product[number] = 1.0

    def select(self, index: Tensor) -> None:
        """Select trials by their numbers, in this order."""
        numbers = index.tolist()
        # Parameters that share a clock continue to.
        changed = {id(clock): clock.mapped(lambda row: row[index]) for clock in self.clocks}
        self.trials = len(numbers)
        self._set_clocks({parameter: changed[id(clock)] for parameter, clock in self._clock_of.items()})
        self.vectors = {}
        after: dict[str, Any] = {
            name: PerTrial([values[number] for number in numbers]) for name, values in self.numbers.items()
        }
        self.update(self.kind.in_tuples(after))


def _split(value: Any) -> tuple[Any, ...]:
    """The parts of a tuple such as `betas`: each a float or one per trial; or from one tuple per trial."""
    return tuple(map(list, zip(*value))) if isinstance(value[0], (tuple, list)) else tuple(value)


def plain_value(value: Any) -> Any:
    """A group's value for a saved state: a number, or a list of them if trials differ."""
    if isinstance(value, tuple) and any(isinstance(one, PerTrial) for one in value):
        trials = next(len(one.values) for one in value if isinstance(one, PerTrial))
        return [list(pair) for pair in zip(*(one_each("", one, trials) for one in value))]
    return list(value.values) if isinstance(value, PerTrial) else value


def as_switch(default: Any, value: Any) -> Any:
    """An option that is the same for all trials, in the type of its default."""
    if isinstance(default, bool):
        return bool(value)
    return tuple(value) if isinstance(value, (list, tuple)) else value


def check_options(name: str, options: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raise for options that this optimizer does not have."""
    kind = KINDS[name]
    valid = list(dict.fromkeys([*kind.torch_names(), *kind.hyperparameters, *kind.common, *also]))
    for option in options:
        if option not in valid:
            raise FusionError(f"optimizer: {name} takes no {option!r}{did_you_mean(option, valid)}")


def check_values(group: FusedGroup) -> None:
    """Raise for values that torch's optimizer refuses."""
    parameter = torch.nn.Parameter(torch.zeros(1, 1))
    for number in range(group.trials):
        values = {name: group.of_trial(name, number) for name in group.kind.torch_names()}
        make: Any = group.kind.torch_class
        try:
            make([parameter], **values, **group.switches)
        except (ValueError, TypeError) as failure:
            raise FusionError(
                f"optimizer: torch's {group.kind_name} refuses trial {number}'s values: {failure}"
            ) from None
