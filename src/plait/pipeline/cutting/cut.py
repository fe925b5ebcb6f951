"""Cuts a traced model into runnable stages, given the layers of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from plait.pipeline.cutting.check_model import StageError
from plait.pipeline.layout import PipelineLayout
from plait.profiler.build import LayersModule, build
from plait.profiler.traced_model import Boundary, TracedModel, Value


@dataclass(frozen=True, eq=False)
class StageModule:
    """A slice of a model that can be run without the rest.

    `module(*inputs)` returns a tuple, in the order of `outputs`. Values of the same name in two stages are
    the same tensor: any later stage may use the output of a stage (skip connections cross stages), and an
    input named like an argument of the model's forward is that argument. Inputs are never written to.
    Parameters are the model's objects under their original names; `first_names` maps each to its first name
    in the model, which is equal for tied parameters in all stages. In evaluation mode the module takes
    `evaluation_inputs` and returns `evaluation_outputs`. `state` is the module whose state a forward changes
    (None: `module`), under the same names.
    """

    layers: tuple[str, ...]
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    first_names: dict[str, str]
    evaluation_inputs: tuple[Value, ...] = ()
    evaluation_outputs: tuple[Value, ...] = ()
    # Frozen parameters that forward writes, and modules that keep Python state between two forwards.
    written: frozenset[str] = frozenset()
    keeping: tuple[str, ...] = ()
    state: nn.Module | None = None


def cut(traced: TracedModel, layer_ids: Iterable[str]) -> StageModule:
    """The stage with the given layers, in any order; they run in the order of the model."""
    layers = traced.select(layer_ids)
    if not layers:
        raise StageError("found a stage without layers; expected at least one")
    if traced.concerns:
        raise StageError(f"{traced.concerns[0].message}, or do not cut through that module")
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
    written = frozenset(n for n, p in held.items() if names[n] in traced.written and not p.requires_grad)
    keeping = [path for kept in traced.kept for path in kept.paths if _holds(module, path)]
    return StageModule(tuple(ids), module, inputs, outputs, names, *evaluated, written, tuple(keeping))


def _holds(module: LayersModule, path: str) -> bool:
    return any(path == name for name, _ in module.named_modules())


def _values(traced: TracedModel, boundary: Boundary) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    inputs = tuple(traced.value(name) for name in boundary.inputs)
    return inputs, tuple(traced.value(name) for name in boundary.outputs)


def written_buffers_of_replicas(traced: TracedModel, pipeline_layout: PipelineLayout) -> set[str]:
    """The buffers that forward writes in stages of several workers."""
    stages = [ids for s, ids in enumerate(pipeline_layout.stages) if len(pipeline_layout.holders(s)) > 1]
    return {name for ids in stages for layer in traced.select(ids) for name in layer.buffers} & traced.written


def evaluation_stages(
    traced: TracedModel, stages: Sequence[Sequence[str]]
) -> tuple[TracedModel, tuple[tuple[str, ...], ...]]:
    """The trace of evaluation mode, and the layers of each stage in it."""
    if traced.evaluation is None:
        return traced, tuple(tuple(ids) for ids in stages)
    evaluated = tuple(tuple(layer.id for layer in traced.evaluated_with(ids)) for ids in stages)
    return traced.evaluation, evaluated
