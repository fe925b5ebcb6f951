"""A float hyperparameter with one value per trial, such as a dropout probability."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from plait.fusion.errors import FusionError, user_line

# For all trials, or one for each.
Number = float | Sequence[float] | Tensor


class PerTrial(float):
    """A float to modules, and one value per trial to the rules.

    Arithmetic is per trial. A comparison returns the common answer of all trials, and raises if they differ,
    as the fused forward cannot take both branches. C code that reads the float, such as `math.sqrt`, gets
    NaN, so that one trial's value is not silently used for all.
    """

    values: tuple[float, ...]
    # Whether this process has created any; arguments are searched for them only then.
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

    def __format__(self, spec: str) -> str:
        return ", ".join(format(value, spec) for value in self.values)

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


def float_holders(
    attributes: dict[str, Any], others: Mapping[str, Any] | None = None
) -> Iterator[tuple[dict[Any, Any], Any, Mapping[Any, Any]]]:
    """The floats in a module's attributes, also in dicts among them: the dict that holds it, and its key.

    The last is the dict in the same place among the attributes `others`.
    """
    others = {} if others is None else others
    for name, value in list(attributes.items()):
        if isinstance(value, float):
            yield attributes, name, others
        elif type(value) is dict:
            keys = [key for key, one in value.items() if isinstance(one, float)]
            yield from ((value, key, others.get(name, {})) for key in keys)


def one_each(name: str, value: Number, trials: int) -> list[float]:
    """The value of each trial, from one value or one per trial."""
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
    """One number per trial as a tensor; cached, since a CUDA graph cannot contain the copy to the device."""
    key = (values, dtype, device)
    if key not in _on_device:
        made = torch.tensor(values, dtype=dtype, device=device)
        if type(made) is not Tensor:  # a fake tensor, which must not be cached
            return made
        if len(_on_device) >= _MOST_KEPT:
            del _on_device[next(iter(_on_device))]
        _on_device[key] = made
    return _on_device[key]


_on_device: dict[Any, Tensor] = {}
_MOST_KEPT = 1024


def of_trials(numbers: Tensor, like: Tensor) -> Tensor:
    """One number per trial, in a shape that broadcasts with `like`, trials first."""
    return numbers.view(-1, *(1,) * (like.dim() - 1))


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
                f"{other}, and the results differ",
                "fuse trials with equal results together, or name this module in fuse(..., unfused=[...])",
            )
        return answers.pop()

    return apply


def _of_one(name: str) -> Callable[[PerTrial], Any]:
    return lambda self: getattr(self._one(), name)()


for _name in ("__int__", "__trunc__", "__floor__", "__ceil__", "__float__", "is_integer"):
    setattr(PerTrial, _name, _of_one(_name))
for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
    setattr(PerTrial, f"__{_name}__", _arithmetic(getattr(operator, _name), swapped=False))
    setattr(PerTrial, f"__r{_name}__", _arithmetic(getattr(operator, _name), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(PerTrial, f"__{_name}__", _comparison(getattr(operator, _name)))
# States of learning rate schedulers hold some, and torch.load reads only types that it was told of.
torch.serialization.add_safe_globals([PerTrial])
