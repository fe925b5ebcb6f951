"""Whole modules: what lies within one stage runs as the user wrote it, and only what a cut divides is opened.

A plan names layers, which are as small as can be, so that it may cut anywhere. Once it is known, each module
all of whose layers are in one stage becomes one layer: the module itself is called, with its own forward,
hooks, autograd functions, buffers and Python state, in training and in evaluation mode. What stays traced is
the code between such modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from plait.pipeline.cutting.cut import StageError, check_stages
from plait.profiler.traced import Layer, TracedModel

Stages = tuple[tuple[str, ...], ...]
# The same model traced again, with the modules of these paths as one layer each.
Retrace = Callable[[frozenset[str]], TracedModel]


def keep_modules_whole(
    traced: TracedModel, stages: Sequence[Sequence[str]], retrace: Retrace
) -> tuple[TracedModel, Stages]:
    """The model and its stages in layers that are whole modules wherever no cut divides them."""
    check_stages(traced, stages)
    stage_of = {id: stage for stage, ids in enumerate(stages) for id in ids}
    calls = _stages_of_calls(traced, stage_of)
    divided = {path for (path, _), found in calls.items() if len(found) > 1}
    whole = frozenset(path for path, _ in calls if path and path not in divided)
    coarse = retrace(whole)
    of_layer = {layer.id: _stage(layer, traced, stage_of, calls) for layer in coarse.layers}
    found = tuple(
        tuple(layer.id for layer in coarse.layers if of_layer[layer.id] == stage)
        for stage in range(len(stages))
    )
    check_stages(coarse, found)
    return coarse, found


def _stages_of_calls(traced: TracedModel, stage_of: dict[str, int]) -> dict[tuple[str, int], set[int]]:
    """The stages in which each call of a module has layers."""
    calls: dict[tuple[str, int], set[int]] = {}
    for layer in traced.layers:
        for call in layer.place.within:
            calls.setdefault(call, set()).add(stage_of[layer.id])
    return calls


def _stage(
    layer: Layer,
    traced: TracedModel,
    stage_of: dict[str, int],
    calls: dict[tuple[str, int], set[int]],
) -> int:
    """The stage of a layer of the coarser trace: that of the layers which stand for the same code."""
    call = layer.place.path, layer.place.call
    if len(calls.get(call, ())) == 1:
        return next(iter(calls[call]))
    same = [
        fine
        for fine in traced.layers
        if (fine.place.path, fine.place.call) == call and fine.place.index <= layer.place.index
    ]
    if not same:
        raise StageError(
            f"the model took another way when it was traced again: {layer.id!r} was not there before; "
            f"expected a forward that does the same every time"
        )
    return stage_of[same[-1].id]


def keep_together(traced: TracedModel, stages: Sequence[Sequence[str]], ids: Iterable[str]) -> Stages | None:
    """`stages` with all layers from the first to the last of `ids` in one of them; None: not possible.

    That one is the stage which has most of them already.
    """
    order = [layer.id for layer in traced.layers]
    places = sorted(order.index(id) for id in ids)
    if not places:
        return None
    moved = set(order[places[0] : places[-1] + 1])
    target = max(range(len(stages)), key=lambda stage: (len(moved & set(stages[stage])), stage))
    found = []
    for stage, own in enumerate(stages):
        kept = {*own, *moved} if stage == target else set(own) - moved
        found.append(tuple(id for id in order if id in kept))
    if not all(found):
        return None
    try:
        check_stages(traced, found)
    except StageError:
        return None
    return tuple(found)
