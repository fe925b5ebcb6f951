"""Checks whether models can be fused (same structure and shapes), and finds the floats that differ."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.core.shown import shown
from plait.fusion.copies import gradient_hooks
from plait.fusion.describe import describe
from plait.fusion.dispatch.install import shared_names
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.verification import unchanged_random_numbers
from plait.verification.overlaps import overlapping
from plait.verification.python_state import changed_by

# Attributes that are compared elsewhere as structure, and internal ones of torch.
_SKIPPED = frozenset(
    (
        "training", "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs",
        "_is_full_backward_hook",
    )
)  # fmt: skip

# Most attributes of a module are empty ones of these.
_CONTAINERS = (dict, list, set, OrderedDict)

T = TypeVar("T")


def check_models(models: Sequence[nn.Module]) -> None:
    """Raise FusionError if models differ in more than values; the message names the first difference."""
    check_structure(models)
    for number, model in enumerate(models[1:], 1):
        if model.training != models[0].training:
            modes = ["training" if one.training else "evaluation" for one in (models[0], model)]
            raise FusionError(
                f"fuse: model 0 is in {modes[0]} and model {number} in {modes[1]}; expected all in one mode"
            )
        for path, name in different_attributes(models[0], model):
            values = [vars(one.get_submodule(path)).get(name) for one in (models[0], model)]
            raise FusionError(
                f"fuse: {path or 'the model'}.{name} is {_short(values[0])} in model 0 and "
                f"{_short(values[1])} in model {number}; only floats, parameters and buffers may differ "
                f"between fused models, and other values must be comparable; plait.fusion.group_by_shape "
                f"sorts models into groups that can be fused"
            )


def check_structure(models: Sequence[nn.Module]) -> None:
    """Raise FusionError if modules, parameters or buffers differ in type or shape."""
    if not models:
        raise FusionError("fuse: found no models, expected one or more of the same shape")
    for number, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise FusionError(f"fuse: found {shown(model)} as model {number}, expected a torch.nn.Module")
        _refuse_tensors(model, number)
        _refuse_hooks(model, number)
        _refuse_overlaps(model, number)
    looks = {
        "modules": _kinds,
        "modes": _modes,
        "parameters and buffers": _shapes,
        "tied weights": shared_names,
    }
    first = {what: look(models[0]) for what, look in looks.items()}
    for number, model in enumerate(models[1:], 1):
        for what, look in looks.items():
            _same(what, first[what], look(model), number)


def _refuse_tensors(model: nn.Module, number: int) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise FusionError(
                f"fuse: {name!r} of model {number} has no shape yet (torch.nn.Lazy...); run one batch "
                f"through each model first, or give the layer its sizes"
            )
        if tensor.layout != torch.strided:
            raise FusionError(
                f"fuse: {name!r} of model {number} is a {str(tensor.layout).removeprefix('torch.')} tensor, "
                f"expected dense parameters and buffers; keep one that all trials share in a plain attribute"
            )


def _refuse_overlaps(model: nn.Module, number: int) -> None:
    for one, other in overlapping((*model.named_parameters(), *model.named_buffers())):
        raise FusionError(
            f"fuse: {one!r} and {other!r} of model {number} share memory but are not one tensor, and a "
            f"fused model would hold them apart; tie weights as one parameter (head.weight = "
            f"table.weight), and register a view of a buffer as a clone() or take it in forward"
        )


def _refuse_hooks(model: nn.Module, number: int) -> None:
    """Raise FusionError for hooks that cannot run once per trial."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise FusionError(
                f"fuse: {name!r} of model {number} has a hook that runs after its gradient is accumulated "
                f"(register_post_accumulate_grad_hook), which would get the parameter of all trials; use "
                f"register_hook, which gets each trial's gradient, or train each model alone"
            )
        for hook in gradient_hooks(parameter):
            if kept := _kept_by(hook, model, parameter):
                raise FusionError(
                    f"fuse: {name!r} of model {number} has a hook that changes {kept}, which its next "
                    f"call may depend on and which all trials would share; train each model alone"
                )


def _kept_by(hook: Any, model: nn.Module, parameter: Tensor) -> str:
    """Describe the Python state that a call of a gradient hook changes; empty if it changes none."""
    with unchanged_random_numbers():
        try:
            names = changed_by(lambda: hook(torch.ones_like(parameter)), {"hook": hook, "model": model})
        except Exception:  # not callable on this gradient; the first step will raise
            return ""
    return next((label for _, label in names), "")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _kinds(model: nn.Module) -> dict[str, Any]:
    tree = _tree(model)
    return {name: _Kind(type(part), tree) for name, part in model.named_modules()}


class _Kind:
    """The class of a module; equal if the import names are, or else the definitions."""

    def __init__(self, kind: type, tree: Mapping[int, str]) -> None:
        self._kind = kind
        self._description = describe(kind, tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self._description == other._description

    def __repr__(self) -> str:
        has_name = self._description == ("class", self._kind.__module__, self._kind.__qualname__)
        # A function may create several different classes with the same name.
        return self._kind.__qualname__ if has_name else f"{self._kind.__qualname__} (made at run time)"


def _modes(model: nn.Module) -> dict[str, str]:
    """The modules whose training mode differs from the model's, such as frozen batch norms."""
    kept = {False: "kept in evaluation", True: "kept in training"}
    return {
        name: kept[part.training] if part.training != model.training else "in the model's mode"
        for name, part in model.named_modules()
    }


def _tree(model: nn.Module) -> dict[int, str]:
    return {id(part): name for name, part in model.named_modules()}


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


def hyperparameters(models: Sequence[nn.Module]) -> list[tuple[str, tuple[Any, ...], list[float]]]:
    """The floats that differ between models: module path, where in its attributes, one value per model.

    A float is an attribute, (name,), or a value of a dict in an attribute, (name, key).
    """
    return [
        (path, where, [float(one) for one in every])
        for path, name, values in _attributes(models)
        for where, every in _numbers_in(name, values)
        if any(isinstance(one, float) for one in every)
        and all(map(_is_number, every))
        and len(set(every)) > 1
    ]


def _numbers_in(name: str, values: list[Any]) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    yield (name,), values
    if all(type(one) is dict for one in values):
        for key in values[0]:
            yield (name, key), [one.get(key) for one in values]


def tensor_attributes(models: Sequence[nn.Module]) -> list[tuple[str, str, list[Tensor]]]:
    """Tensors in plain attributes that differ between models: module path, name, one per model."""
    return [
        (path, name, every)
        for path, name, every in _attributes(models)
        if isinstance(every[0], Tensor) and not all(_is_equal(every[0], one) for one in every[1:])
    ]


def _attributes(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, list[Any]]]:
    """The plain attributes of all modules: module path, name, one value per model."""
    parts = [dict(model.named_modules()) for model in models]
    for path, part in parts[0].items():
        for name in vars(part):
            if name not in _SKIPPED:
                yield path, name, [vars(other[path]).get(name) for other in parts]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    if one.layout == other.layout == torch.strided:
        return torch.equal(one, other)
    return describe(one) == describe(other)


def different_attributes(first: nn.Module, other: nn.Module) -> list[tuple[str, str]]:
    """Attributes other than floats, parameters and buffers in which two models differ: path and name."""
    others = dict(other.named_modules())
    trees = _tree(first), _tree(other)
    return [
        (path, name)
        for path, part in first.named_modules()
        # A scripted module runs trial by trial, so its attributes may differ.
        for name in dict.fromkeys([*vars(part), *vars(others[path])])
        if name not in _SKIPPED
        and not isinstance(part, torch.jit.ScriptModule)
        and not _is_alike(_attribute(part, name), _attribute(others[path], name), trees)
    ]


def _attribute(part: nn.Module, name: str) -> Any:
    """An attribute for comparison; for torch's hooks the functions, without their ids."""
    value = vars(part).get(name)
    if isinstance(value, Patch):  # compare the forward of the class
        return None
    return tuple(value.values()) if "_hooks" in name and isinstance(value, dict) else value


def _is_alike(first: Any, other: Any, trees: tuple[Mapping[int, str], Mapping[int, str]]) -> bool:
    if first is other or (type(first) is type(other) and type(first) in _CONTAINERS and not (first or other)):
        return True
    if isinstance(first, Tensor) and isinstance(other, Tensor) and first.layout == torch.strided:
        return (first.shape, first.dtype, first.layout) == (other.shape, other.dtype, other.layout)
    if _is_number(first) and _is_number(other) and float in (type(first), type(other)):
        return True
    if type(first) is dict and type(other) is dict and _has_floats(first) and list(first) == list(other):
        return all(_is_alike(first[key], other[key], trees) for key in first)
    return describe(first, trees[0]) == describe(other, trees[1])


def _has_floats(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, float) for value in values.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def group_by_shape(items: Sequence[T], model_of: Callable[[T], nn.Module]) -> list[list[T]]:
    """`items` in groups whose models can be fused with each other, in order of appearance."""
    groups: list[list[T]] = []
    for item in items:
        for group in groups:
            with contextlib.suppress(FusionError):
                check_models([model_of(group[0]), model_of(item)])
                group.append(item)
                break
        else:
            groups.append([item])
    return groups
