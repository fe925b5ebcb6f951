"""Cutting: a traced model and the layers of each stage in, runnable stages out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.core.errors import InputError
from plait.profiler.build import LayersModule, build
from plait.profiler.traced import Boundary, TracedModel, Value


class StageError(InputError):
    """Layers that cannot be the stages of one pipeline."""


@dataclass(frozen=True, eq=False)
class StageModule:
    """A slice of a model that runs by itself.

    `module(*inputs)` returns a tuple, in the order of `outputs`. Values of the same name in two stages are
    the same tensor: what one stage gives, any later one may take (skips reach over stages between), and an
    input named like an argument of the model's forward is that argument. Inputs are never written into.
    The parameters are the model's own objects under their original names; `first_names` maps each to the
    first name the model has for it, equal for tied parameters wherever they are. In evaluation mode the
    module takes `evaluation_inputs` and returns `evaluation_outputs`.
    """

    layers: tuple[str, ...]
    module: LayersModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    first_names: dict[str, str]
    evaluation_inputs: tuple[Value, ...] = ()
    evaluation_outputs: tuple[Value, ...] = ()


def cut(traced: TracedModel, layer_ids: Iterable[str]) -> StageModule:
    """The stage that consists of the layers named, whatever their order; they run in the model's order."""
    layers = traced.select(layer_ids)
    if not layers:
        raise StageError("found a stage without layers; expected at least one")
    if traced.concerns:
        raise StageError(f"{traced.concerns[0].words}, or let no cut pass through that module")
    boundary = traced.boundary(layers)
    module = build(traced, layers, boundary, own_inputs=True)
    first: dict[int, str] = {}
    for name, parameter in traced.model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    ids = [layer.id for layer in layers]
    inputs, outputs = _values(traced, boundary)
    other = traced.evaluation
    evaluated = (
        _values(other, other.boundary(traced.evaluated_with(ids))) if other is not None else (inputs, outputs)
    )
    held = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in held.items():
        if id(parameter) not in first:
            raise StageError(
                f"forward uses a parameter of shape {tuple(parameter.shape)} ({name}) that the model does "
                f"not have: its module is not registered (kept in a list, a dict or __dict__); make it an "
                f"attribute of a module, an nn.ModuleList or an nn.ModuleDict, frozen if it is not trained"
            )
    names = {name: first[id(parameter)] for name, parameter in held.items()}
    return StageModule(tuple(ids), module, inputs, outputs, names, *evaluated)


def _values(traced: TracedModel, boundary: Boundary) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    inputs = tuple(traced.value(name) for name in boundary.inputs)
    return inputs, tuple(traced.value(name) for name in boundary.outputs)


def cut_all(traced: TracedModel, stages: Sequence[Sequence[str]]) -> tuple[StageModule, ...]:
    """All stages, checked: every layer is in exactly one, and values flow only to later stages."""
    check_stages(traced, stages)
    check_buffers(traced, stages)
    return tuple(cut(traced, ids) for ids in stages)


def check_stages(traced: TracedModel, stages: Sequence[Sequence[str]]) -> None:
    """Refuse stages that leave a layer out, hold one twice, or need a value from a later stage."""
    stage_of: dict[str, int] = {}
    for index, ids in enumerate(stages):
        for layer in traced.select(ids):
            if layer.id in stage_of:
                raise StageError(
                    f"layer {layer.id!r} is in stages {stage_of[layer.id]} and {index}; expected one"
                )
            stage_of[layer.id] = index
    missing = [layer.id for layer in traced.layers if layer.id not in stage_of]
    if missing:
        raise StageError(
            f"{len(missing)} layers are in no stage, the first is {missing[0]!r}; add them to one"
        )
    _check_flow(traced, stage_of, "")
    if traced.evaluation is not None:
        homes = {id: stage_of[home] for id, home in traced.homes.items()}
        _check_flow(traced.evaluation, homes, " in evaluation mode")


def check_buffers(traced: TracedModel, stages: Sequence[Sequence[str]]) -> None:
    """Refuse a buffer that one stage writes and another uses: each worker has a copy of its own."""
    for name, found in shared_buffers(traced, stages).items():
        raise StageError(
            f"buffer {name!r} is written by forward and used in stages {sorted(found)}, each of which would "
            f"have its own; expected one: let no cut come between the layers that use it"
        )


def shared_buffers(traced: TracedModel, stages: Sequence[Sequence[str]]) -> dict[str, set[int]]:
    """The buffers that forward writes and several stages use, with those stages."""
    found: dict[str, set[int]] = {}
    for stage, ids in enumerate(stages):
        for layer in traced.select(ids):
            for name in layer.buffers:
                if name in traced.written:
                    found.setdefault(name, set()).add(stage)
    return {name: used for name, used in found.items() if len(used) > 1}


def evaluation_stages(
    traced: TracedModel, stages: Sequence[Sequence[str]]
) -> tuple[TracedModel, tuple[tuple[str, ...], ...]]:
    """The trace that an evaluation runs, and the layers of each stage in it."""
    if traced.evaluation is None:
        return traced, tuple(tuple(ids) for ids in stages)
    found = tuple(tuple(layer.id for layer in traced.evaluated_with(ids)) for ids in stages)
    return traced.evaluation, found


def _check_flow(traced: TracedModel, stage_of: dict[str, int], when: str) -> None:
    for layer in traced.layers:
        for name in traced.boundary([layer]).inputs:
            source = traced.layer_of.get(name)
            if source is not None and stage_of[source] > stage_of[layer.id]:
                raise StageError(
                    f"layer {layer.id!r} of stage {stage_of[layer.id]} needs {name!r}{when} from layer "
                    f"{source!r} of stage {stage_of[source]}; expected values to flow to later stages only"
                )
