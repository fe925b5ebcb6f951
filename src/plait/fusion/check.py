"""Whether models can be fused: the same structure and shapes; and which numbers differ between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.core.shown import shown
from plait.fusion.describe import describe
from plait.fusion.dispatch.install import shared_names
from plait.fusion.errors import FusionError

# What the structure is compared by, and what torch keeps in addition.
_SKIPPED = frozenset(
    (
        "training", "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "forward",
        "_is_full_backward_hook",
    )
)  # fmt: skip

T = TypeVar("T")


def check_models(models: Sequence[nn.Module]) -> None:
    """Refuse models that differ in more than values, naming the first difference."""
    check_structure(models)
    for number, model in enumerate(models[1:], 1):
        for path, name in different_attributes(models[0], model):
            found = [vars(one.get_submodule(path)).get(name) for one in (models[0], model)]
            raise FusionError(
                f"fuse: {path or 'the model'}.{name} is {_short(found[0])} in model 0 and {_short(found[1])} "
                f"in model {number}; floats, parameters and buffers may differ between fused models, other "
                f"values not; plait.fusion.group_by_shape sorts models into groups that can be fused"
            )


def check_structure(models: Sequence[nn.Module]) -> None:
    """Refuse models whose modules, parameters and buffers are not of the same kinds and shapes."""
    if not models:
        raise FusionError("fuse: found no models, expected one or more of the same shape")
    for number, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise FusionError(f"fuse: found {shown(model)} as model {number}, expected a torch.nn.Module")
        _refuse_lazy(model, number)
    first = models[0]
    for number, model in enumerate(models[1:], 1):
        _same("modules", _kinds(first), _kinds(model), number)
        _same("parameters and buffers", _shapes(first), _shapes(model), number)
        _same("tied weights", shared_names(first), shared_names(model), number)


def _refuse_lazy(model: nn.Module, number: int) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise FusionError(
                f"fuse: {name!r} of model {number} has no shape yet (torch.nn.Lazy...); run one batch "
                f"through each model first, or give the layer its sizes"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
        for name in vars(part):
            every: list[Any] = [vars(other[path]).get(name) for other in others]
            is_float = any(isinstance(one, float) for one in every) and all(map(_is_number, every))
            if is_float and name not in _SKIPPED and len(set(every)) > 1:
                found.append((path, name, [float(one) for one in every]))
    return found


def tensor_attributes(models: Sequence[nn.Module]) -> list[tuple[str, str, list[Tensor]]]:
    """Tensors in plain attributes that differ between models: the module's path, the name, one a model."""
    found = []
    others = [dict(model.named_modules()) for model in models]
    for path, part in models[0].named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and name not in _SKIPPED:
                every = [vars(other[path])[name] for other in others]
                if not all(torch.equal(value, one) for one in every[1:]):
                    found.append((path, name, every))
    return found


def different_attributes(first: nn.Module, other: nn.Module) -> list[tuple[str, str]]:
    """Where two models of one structure differ in what is no float, parameter or buffer: path and name."""
    others = dict(other.named_modules())
    return [
        (path, name)
        for path, part in first.named_modules()
        for name in dict.fromkeys([*vars(part), *vars(others[path])])
        if name not in _SKIPPED and not _is_alike(_attribute(part, name), _attribute(others[path], name))
    ]


def _attribute(part: nn.Module, name: str) -> Any:
    """An attribute as it counts: of torch's hooks the functions, not the numbers they were given."""
    value = vars(part).get(name)
    return tuple(value.values()) if "_hooks" in name and isinstance(value, dict) else value


def _description(part: nn.Module, name: str) -> Hashable:
    """An attribute as it must be the same in models that are fused."""
    value = _attribute(part, name)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    return value != 0 if isinstance(value, float) else describe(value)


def _is_alike(first: Any, other: Any) -> bool:
    if first is other:
        return True
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return first.shape == other.shape and first.dtype == other.dtype
    if _is_number(first) and _is_number(other) and float in (type(first), type(other)):
        return True
    return describe(first) == describe(other)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def group_by_shape(items: Sequence[T], model_of: Callable[[T], nn.Module]) -> list[list[T]]:
    """`items` in groups whose models can be fused, in order of appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(shape_key(model_of(item)), []).append(item)
    return list(groups.values())


def shape_key(model: nn.Module) -> Hashable:
    """What models that can be fused have in common: structure, shapes, attributes that are no floats.

    Of a float only whether it is zero counts: a model that asks so takes another branch.
    """
    values = tuple(
        (path, name, _description(part, name))
        for path, part in model.named_modules()
        for name in vars(part)
        if name not in _SKIPPED
    )
    return (*_kinds(model).items(), *_shapes(model).items(), *shared_names(model).items(), *values)
