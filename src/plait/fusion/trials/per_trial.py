"""A float hyperparameter that each trial has its own value of, such as a dropout probability."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from plait.fusion.errors import FusionError, user_line

# For all trials, or one for each.
Number = float | Sequence[float] | Tensor


class PerTrial(float):
    """A float in the eyes of a module, and one value a trial in those of the rules.

    Arithmetic stays per trial. A comparison answers where all trials agree, and is refused elsewhere: the
    fused forward cannot take both branches. C code that reads the float itself, `math.sqrt` say, finds NaN:
    one trial's value would pass unseen for all.
    """

    values: tuple[float, ...]
    # Whether this process has ever made one: calls are searched for them only then.
    made_any: ClassVar[bool] = False

    def __new__(cls, values: Sequence[float]) -> PerTrial:
        PerTrial.made_any = True
        made = super().__new__(cls, values[0] if len(set(values)) == 1 else math.nan)
        made.values = tuple(float(value) for value in values)
        return made

    def of(self, trial: int) -> float:
        return self.values[trial]

    def __repr__(self) -> str:
        return f"PerTrial{self.values}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (PerTrial, (self.values,))

    def __bool__(self) -> bool:
        differs: bool = self != 0.0
        return differs

    def __neg__(self) -> PerTrial:
        return PerTrial([-value for value in self.values])

    def __pos__(self) -> PerTrial:
        return self

    def __abs__(self) -> PerTrial:
        return PerTrial([abs(value) for value in self.values])

    def __round__(self, digits: Any = None) -> Any:
        return round(self._one()) if digits is None else PerTrial([round(v, digits) for v in self.values])

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __int__(self) -> int:
        return int(self._one())

    def __trunc__(self) -> int:
        return math.trunc(self._one())

    def __floor__(self) -> int:
        return math.floor(self._one())

    def __ceil__(self) -> int:
        return math.ceil(self._one())

    def is_integer(self) -> bool:
        return self._one().is_integer()

    def __format__(self, spec: str) -> str:
        return ", ".join(format(value, spec) for value in self.values)

    def __float__(self) -> float:
        return self._one()

    def _one(self) -> float:
        if len(set(self.values)) > 1:
            raise FusionError(
                f"{user_line()}\n  makes one number of a hyperparameter that differs between trials "
                f"{self.values}",
                "name this module in fuse(..., unfused=[...]); in a scheduler, give all trials one value",
            )
        return self.values[0]

    def __hash__(self) -> int:
        return hash(self.values)


def one_each(name: str, value: Number, trials: int) -> list[float]:
    """The value of each trial, from one for all or one each."""
    values = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(values, PerTrial):
        values = values.values
    if isinstance(values, (int, float)):
        return [float(values)] * trials
    if len(values) != trials:
        raise FusionError(
            f"{name} has {len(values)} values, expected one, or one for each of the {trials} trials"
        )
    return [float(one) for one in values]


def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number a trial as a tensor; kept, since a copy to a device cannot be part of a CUDA graph."""
    key = (values, dtype, device)
    if key not in _on_device:
        made = torch.tensor(values, dtype=dtype, device=device)
        if type(made) is not Tensor:  # it has no memory, and is of no use but here
            return made
        if len(_on_device) >= _MOST_KEPT:
            del _on_device[next(iter(_on_device))]
        _on_device[key] = made
    return _on_device[key]


_on_device: dict[Any, Tensor] = {}
_MOST_KEPT = 1024


def _other_values(other: Any, count: int) -> Sequence[float] | None:
    if isinstance(other, PerTrial):
        return other.values
    return [float(other)] * count if isinstance(other, (int, float)) else None


def _arithmetic(operation: Callable[[float, float], float], swapped: bool) -> Callable[..., Any]:
    def apply(self: PerTrial, other: Any) -> Any:
        others = _other_values(other, len(self.values))
        if others is None:
            return NotImplemented
        pairs = zip(others, self.values) if swapped else zip(self.values, others)
        return PerTrial([operation(a, b) for a, b in pairs])

    return apply


def _comparison(operation: Callable[[float, float], bool]) -> Callable[..., Any]:
    def apply(self: PerTrial, other: Any) -> Any:
        others = _other_values(other, len(self.values))
        if others is None:
            return NotImplemented
        answers = {operation(a, b) for a, b in zip(self.values, others)}
        if len(answers) > 1:
            raise FusionError(
                f"{user_line()}\n  compares a hyperparameter that differs between trials {self.values} with "
                f"{other}, and the answers differ",
                "fuse trials with equal answers together, or name this module in fuse(..., unfused=[...])",
            )
        return answers.pop()

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
    setattr(PerTrial, f"__{_name}__", _arithmetic(getattr(operator, _name), swapped=False))
    setattr(PerTrial, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(PerTrial, f"__{_name}__", _comparison(getattr(operator, _name)))
