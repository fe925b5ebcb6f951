"""Why a model or its layers are refused as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from plait.core.errors import InputError
from plait.pipeline.layout import PipelineLayout
from plait.profiler.traced_model import Layer, TracedModel
from plait.verification.overlaps import overlapping


class StageError(InputError):
    """Layers that cannot be the stages of one pipeline."""


def check_stages(traced: TracedModel, stages: Sequence[Sequence[str]]) -> None:
    """Raise StageError if a layer is in no stage or in two, or needs a value from a later stage."""
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
    """Raise StageError if one stage writes a tensor that another uses: each worker has its own copy.

    Also for tensors that change and share memory: stages and their versions of weights hold them apart.
    """
    if (why := shared_memory(traced)) is not None:
        raise StageError(why)
    for name, users in shared_tensors(traced, stages).items():
        raise StageError(
            f"{describe_tensor(traced, name)} is written by forward and used in stages {sorted(users)}, each "
            f"of which would have its own copy; expected one stage: do not cut between the layers that use it"
        )


def shared_memory(traced: TracedModel) -> str | None:
    """Which parameters or buffers that change share memory without being one tensor, in words, if any do."""
    trained = {name for name, parameter in traced.model.named_parameters() if parameter.requires_grad}
    for one, other in overlapping((*traced.model.named_parameters(), *traced.model.named_buffers())):
        if not (trained | traced.written).isdisjoint((one, other)):
            return (
                f"{one!r} and {other!r} share memory but are not one tensor, and stages hold them apart; "
                f"expected weights tied as one parameter (head.weight = table.weight), and no registered "
                f"view of a buffer that forward writes"
            )
    return None


def shared_tensors(traced: TracedModel, stages: Sequence[Sequence[str]]) -> dict[str, set[int]]:
    """The parameters, buffers and constants that forward writes and several stages use, with those stages."""
    stages_of: dict[str, set[int]] = {}
    for stage, ids in enumerate(stages):
        for layer in (*traced.select(ids), *traced.evaluated_with(ids)):
            for name in used_tensors(layer):
                if name in traced.written:
                    stages_of.setdefault(name, set()).add(stage)
    return {name: used for name, used in stages_of.items() if len(used) > 1}


def used_tensors(layer: Layer) -> tuple[str, ...]:
    """The parameters, buffers and constants of a layer."""
    constants = (str(node.target) for node in layer.nodes if node.op == "get_attr")
    return tuple(dict.fromkeys([*layer.parameters, *layer.buffers, *constants]))


def describe_tensor(traced: TracedModel, name: str) -> str:
    """The kind and name of a tensor for messages, such as `parameter 'a.weight'`."""
    if name in traced.constants:
        return f"a tensor of shape {tuple(traced.constants[name].shape)}, which is not a buffer of the model,"
    parameters = {each for each, _ in traced.model.named_parameters()}
    return f"{'parameter' if name in parameters else 'buffer'} {name!r}"


def check_state(traced: TracedModel, pipeline_layout: PipelineLayout) -> None:
    """Raise StageError for state that forwards keep in a stage with several workers.

    Each of them sees only some of the microbatches. Also for weights that forward writes and that have
    several versions: it would write to only one of them.
    """
    replicated = [s for s, _ in enumerate(pipeline_layout.stages) if len(pipeline_layout.holders(s)) > 1]
    inside = {layer.id: s for s, ids in enumerate(pipeline_layout.stages) for layer in traced.select(ids)}
    advice = "plan one worker for that stage, or use plan: data-parallel"
    for kept in traced.kept:
        for layer in traced.inside(kept.paths):
            if inside[layer.id] in replicated:
                raise StageError(
                    f"{kept.message}, but stage {inside[layer.id]} has several workers, each of which sees "
                    f"only some of the microbatches; keep it in a buffer that may differ, or {advice}"
                )
    trained = {name: p.requires_grad for name, p in traced.model.named_parameters()}
    for layer in traced.layers:
        stage = inside[layer.id]
        for name in set(used_tensors(layer)) & traced.written:
            if stage in replicated and (name in trained or name in traced.constants):
                raise StageError(
                    f"{describe_tensor(traced, name)} is written by forward, but stage {stage} has several "
                    f"workers, each of which would write its own; {advice}"
                )
            versions = not pipeline_layout.schedule.synchronous
            if trained.get(name) and (versions or stage in pipeline_layout.recompute):
                raise StageError(
                    f"parameter {name!r} is trained, and written by forward, which is correct only if there "
                    f"is one version of the weights and each forward runs once; use schedule flush without "
                    f"recompute"
                )


def _check_flow(traced: TracedModel, stage_of: dict[str, int], when: str) -> None:
    for layer in traced.layers:
        for name in traced.boundary([layer]).inputs:
            source = traced.layer_of.get(name)
            if source is not None and stage_of[source] > stage_of[layer.id]:
                raise StageError(
                    f"layer {layer.id!r} of stage {stage_of[layer.id]} needs {name!r}{when} from layer "
                    f"{source!r} of stage {stage_of[source]}; expected values to flow to later stages only"
                )
