"""Optimizers by name, with parameter groups."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from plait.core.errors import JobError
from plait.core.names import check_arguments, did_you_mean, parameters_of, resolve
from plait.core.shown import shown
from plait.data.call_model import has_modes, set_mode
from plait.pipeline.named_state import remember_start
from plait.schema.settings import GroupSettings, OptimizerSettings
from plait.sync.weight_ema import keep_ema
from plait.training.optimizers.torch_kernels import use_fused_kernels
from plait.workloads.lion import Lion

_ONLY_MATRICES = (
    "; freeze what is no matrix, as adapters do, or name an optimizer of your own that updates the rest by "
    "another rule"
)


def optimizer_kinds() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch.optim, and Lion, under its name in lower case."""
    classes: list[type] = [Lion, *(c for _, c in inspect.getmembers(torch.optim, inspect.isclass))]
    return {
        c.__name__.lower(): c
        for c in classes
        if issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    }


def find_optimizer(settings: OptimizerSettings) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer's class, with its options checked against its signature."""
    kind = settings.kind
    if ":" in kind:
        factory: Callable[..., torch.optim.Optimizer] = resolve(kind, "optimizer.kind", JobError)
    elif kind in (kinds := optimizer_kinds()):
        factory = kinds[kind]
    else:
        raise JobError(
            f"optimizer.kind: found {kind!r}, expected an optimizer of torch.optim in lower case, lion, "
            f"or 'package.module:name'{did_you_mean(kind, kinds)}"
        )
    sections: dict[str, Mapping[str, Any]] = {"optimizer": {}}
    sections |= {f"optimizer.groups[{number}]": group.options for number, group in enumerate(settings.groups)}
    for where, options in sections.items():
        given = {**settings.options, **options}
        check_arguments(factory, given, where, JobError, positional=1)
        _check_numbers(factory, options or given, where)
    take_step = getattr(factory, "step", None)
    closure = parameters_of(take_step).get("closure") if take_step is not None else None
    if closure is not None and closure.default is closure.empty:
        raise JobError(
            f"optimizer.kind: {kind} runs the model several times a step; expected one that takes a gradient"
        )
    return factory


def _check_numbers(factory: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
    """Refuse text and truth values where the optimizer's own value is a number, or several."""
    parameters = parameters_of(factory)
    for name, value in options.items():
        usual = parameters[name].default if name in parameters else None
        if isinstance(usual, tuple) and isinstance(value, (list, tuple)):
            usual, wrong = usual[0], next((item for item in value if isinstance(item, (str, bool))), None)
        else:
            wrong = value if isinstance(value, (str, bool)) else None
        if (wrong is None and value is not None) or not isinstance(usual, (int, float)):
            continue
        if not isinstance(usual, bool):
            found = "null" if value is None else repr(wrong)
            raise JobError(f"{where}.{name}: found {found}, expected a number")


def group_of(groups: Sequence[GroupSettings], name: str) -> int:
    """The place of the first of `groups` that a parameter's name matches, counted from 1; else 0."""
    for number, group in enumerate(groups, 1):
        if any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in group.match.split("|")):
            return number
    return 0


def check_groups(groups: Sequence[GroupSettings], names: Iterable[str]) -> None:
    """Refuse a group that no parameter is in: its patterns are misspelt, or those before take them all."""
    names = list(names)
    used = {group_of(groups, name) for name in names}
    for number, group in enumerate(groups, 1):
        if number in used:
            continue
        where = f"optimizer.groups[{number - 1}].match: found {shown(group.match)}"
        taken = [name for name in names if group_of([group], name)]
        if taken:
            raise JobError(
                f"{where}, but all that it matches, such as {taken[0]!r}, is in groups before it; leave it "
                f"out, or put it first"
            )
        words = [pattern.strip().strip("*") for pattern in group.match.split("|")]
        near = [close for word in words for close in difflib.get_close_matches(word, names, 3, 0.0)]
        raise JobError(
            f"{where}, which no parameter that is trained matches; expected patterns such as *.bias, "
            f"separated by |; the nearest names: {', '.join(dict.fromkeys(near))}"
        )


def _grouped(
    groups: Sequence[GroupSettings],
    parameters: Sequence[torch.nn.Parameter],
    names: Mapping[torch.Tensor, str],
) -> list[dict[str, Any]]:
    """The parameters as torch's groups: the others first, then each of `groups`, also one without any.

    So all stages of a pipeline have the same groups.
    """
    param_groups: list[dict[str, Any]] = [{"params": []}]
    param_groups += [{"params": [], **_as_tuples(group.options)} for group in groups]
    for parameter in parameters:
        param_groups[group_of(groups, names.get(parameter, ""))]["params"].append(parameter)
    return param_groups


def _as_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


def build_optimizer(
    settings: OptimizerSettings,
    parameters: Iterable[torch.nn.Parameter],
    names: Mapping[torch.Tensor, str] | None = None,
    plain: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of `parameters`, which steps with torch's fused kernels where that is faster.

    Their `names` say in which of the settings' groups they are. With `plain`, torch chooses the kernels.
    """
    factory = find_optimizer(settings)
    content: list[Any] = list(parameters)
    if settings.groups:
        content = _grouped(settings.groups, content, names or {})
    try:
        optimizer = factory(content, **_as_tuples(settings.options))
    except (ValueError, TypeError) as failure:
        hint = _ONLY_MATRICES if "2D" in str(failure) else ""
        raise JobError(
            f"optimizer: {settings.kind} refused {dict(settings.options)}: {failure}{hint}"
        ) from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer.kind: {settings.kind} returned {shown(optimizer)}, expected a torch.optim.Optimizer"
        )
    if settings.ema is not None:
        if has_modes(optimizer):
            raise JobError(f"optimizer.ema: {settings.kind} evaluates an average already; leave it out")
        keep_ema(optimizer, settings.ema.decay, settings.ema.evaluate)
    set_mode(optimizer, training=True)
    remember_start(optimizer)
    if not plain:
        use_fused_kernels(optimizer)
    return optimizer
