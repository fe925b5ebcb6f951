"""Whether models can be fused: the same structure and shapes; and which numbers differ between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.core.shown import shown
from plait.fusion.errors import FusionError
from plait.fusion.install import shared_names

_SKIPPED = frozenset(
    ("training", "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")
)

T = TypeVar("T")


def check_models(models: Sequence[nn.Module]) -> None:
    """Refuse models that differ in more than values, naming the first difference."""
    if not models:
        raise FusionError("fuse: found no models, expected one or more of the same shape")
    for number, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise FusionError(f"fuse: found {shown(model)} as model {number}, expected a torch.nn.Module")
    first = models[0]
    for number, model in enumerate(models[1:], 1):
        _same("modules", _kinds(first), _kinds(model), number)
        _same("parameters and buffers", _shapes(first), _shapes(model), number)
        _same("tied weights", shared_names(first), shared_names(model), number)
    _check_attributes(models)


def _kinds(model: nn.Module) -> dict[str, Any]:
    return {name: type(part).__qualname__ for name, part in model.named_modules()}


def _shapes(model: nn.Module) -> dict[str, Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tuple(t.shape), str(t.dtype), str(t.device), t.requires_grad) for name, t in tensors}


def _same(what: str, expected: dict[str, Any], found: dict[str, Any], number: int) -> None:
    if expected == found:
        return
    name = next(n for n in [*expected, *found] if expected.get(n) != found.get(n))
    raise FusionError(
        f"fuse: models 0 and {number} differ in their {what}: {name!r} is {expected.get(name)} in "
        f"model 0 and {found.get(name)} in model {number}; fused models have the same structure; "
        f"plait.fusion.group_by_shape sorts models into groups that have"
    )


def hyperparameters(models: Sequence[nn.Module]) -> list[tuple[str, str, list[float]]]:
    """The float attributes that differ between models: the module's path, the name, a value a model."""
    found = []
    others = [dict(model.named_modules()) for model in models]
    for path, part in models[0].named_modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and name not in _SKIPPED:
                values = [float(getattr(other[path], name)) for other in others]
                if len(set(values)) > 1:
                    found.append((path, name, values))
    return found


def _check_attributes(models: Sequence[nn.Module]) -> None:
    others = [dict(model.named_modules()) for model in models]
    for path, part in models[0].named_modules():
        for name, value in vars(part).items():
            if name in _SKIPPED:
                continue
            for number, other in enumerate(others[1:], 1):
                _check_attribute(path, name, value, vars(other[path]).get(name), number)


def _check_attribute(path: str, name: str, first: Any, other: Any, number: int) -> None:
    if isinstance(first, Tensor):
        equal = isinstance(other, Tensor) and first.shape == other.shape and torch.equal(first, other)
    elif isinstance(first, float) and not isinstance(first, bool):
        equal = isinstance(other, (int, float))
    elif isinstance(first, (bool, int, str, tuple, torch.dtype)):
        equal = first == other
    else:
        return
    if not equal:
        raise FusionError(
            f"fuse: {path or 'the model'}.{name} is {first} in model 0 and {other} in model {number}; "
            f"floats, parameters and buffers may differ between fused models, other values not"
        )


def group_by_shape(items: Sequence[T], model_of: Callable[[T], nn.Module]) -> list[list[T]]:
    """`items` in groups whose models can be fused, in order of appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(shape_key(model_of(item)), []).append(item)
    return list(groups.values())


def shape_key(model: nn.Module) -> Hashable:
    """What models that can be fused have in common: structure, shapes, numbers that are no floats.

    Of a float only whether it is zero counts: a model that asks so takes another branch.
    """
    numbers = tuple(
        (path, name, value != 0 if isinstance(value, float) else value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, str, float)) and name not in _SKIPPED
    )
    return (*_kinds(model).items(), *_shapes(model).items(), *shared_names(model).items(), *numbers)
