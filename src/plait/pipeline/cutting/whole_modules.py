"""Keeps modules that are within one stage whole: they run as written, and only divided modules are traced.

A plan names the smallest layers, so that it can cut anywhere. Given the plan, each module with all its layers
in one stage becomes one layer: the module itself is called, with its forward, hooks, autograd functions,
buffers and Python state, in training and in evaluation mode. Only the code between such modules stays traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plait.pipeline.cutting.check_model import StageError, check_stages
from plait.profiler.traced_model import Layer, TracedModel

Stages = tuple[tuple[str, ...], ...]
# Traces the same model again, with each of these modules as one layer.
Retrace = Callable[[frozenset[str]], TracedModel]


def keep_modules_whole(
    traced: TracedModel, stages: Sequence[Sequence[str]], retrace: Retrace
) -> tuple[TracedModel, Stages]:
    """Retrace with every module that no cut divides as one layer; returns the trace and its stages."""
    check_stages(traced, stages)
    stage_of = {id: stage for stage, ids in enumerate(stages) for id in ids}
    calls = _stages_of_calls(traced, stage_of)
    divided = {path for (path, _), used in calls.items() if len(used) > 1}
    whole = frozenset(path for path, _ in calls if path and path not in divided)
    coarse = retrace(whole)
    of_layer = {layer.id: _stage(layer, traced, stage_of, calls) for layer in coarse.layers}
    coarse_stages = tuple(
        tuple(layer.id for layer in coarse.layers if of_layer[layer.id] == stage)
        for stage in range(len(stages))
    )
    check_stages(coarse, coarse_stages)
    return coarse, coarse_stages


def _stages_of_calls(traced: TracedModel, stage_of: dict[str, int]) -> dict[tuple[str, int], set[int]]:
    """The stages that contain layers of each call of a module."""
    calls: dict[tuple[str, int], set[int]] = {}
    for layer in traced.layers:
        for call in layer.location.within:
            calls.setdefault(call, set()).add(stage_of[layer.id])
    return calls


def _stage(
    layer: Layer,
    traced: TracedModel,
    stage_of: dict[str, int],
    calls: dict[tuple[str, int], set[int]],
) -> int:
    """The stage of a layer of the coarser trace: that of the finer layers for the same code."""
    call = layer.location.path, layer.location.call
    if len(calls.get(call, ())) == 1:
        return next(iter(calls[call]))
    same = [
        fine
        for fine in traced.layers
        if (fine.location.path, fine.location.call) == call and fine.location.index <= layer.location.index
    ]
    if not same:
        raise StageError(
            f"the model took another path when it was traced again: {layer.id!r} is new; "
            f"expected a forward that does the same every time"
        )
    return stage_of[same[-1].id]


def keep_together(traced: TracedModel, stages: Sequence[Sequence[str]], ids: Iterable[str]) -> Stages | None:
    """`stages` with all layers from the first to the last of `ids` in one stage; None if impossible.

    That is the stage which already has most of them.
    """
    order = [layer.id for layer in traced.layers]
    indices = sorted(order.index(id) for id in ids)
    if not indices:
        return None
    moved = set(order[indices[0] : indices[-1] + 1])
    target = max(range(len(stages)), key=lambda stage: (len(moved & set(stages[stage])), stage))
    merged = []
    for stage, layers in enumerate(stages):
        kept = {*layers, *moved} if stage == target else set(layers) - moved
        merged.append(tuple(id for id in order if id in kept))
    if not all(merged):
        return None
    try:
        check_stages(traced, merged)
    except StageError:
        return None
    return tuple(merged)
