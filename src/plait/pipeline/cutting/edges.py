"""Routes: which values each stage sends to which later stage, directly, also past other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.profiler.traced import TracedModel


@dataclass(frozen=True)
class StageEdge:
    """Values that stage `source` hands to stage `target`; gradients of `grad_names` come back.

    The loader belongs to stage 0: what later stages need of the model's inputs starts there, and so does
    the batch's target (`takes_target`), which the last stage needs for the loss.
    """

    source: int
    target: int
    names: tuple[str, ...]
    grad_names: tuple[str, ...]
    takes_target: bool = False


def find_routes(traced: TracedModel, stages: Sequence[Sequence[str]]) -> tuple[StageEdge, ...]:
    """All routes between `stages` (layers of each), in the order of their sources, then targets."""
    boundaries = [traced.boundary(traced.select(ids)) for ids in stages]
    source_of = dict.fromkeys(traced.inputs, 0)
    source_of |= {name: s for s, boundary in enumerate(boundaries) for name in boundary.outputs}
    last = len(stages) - 1
    carried: dict[tuple[int, int], list[str]] = {(0, last): []} if last else {}
    for stage, boundary in enumerate(boundaries):
        # The loss needs all that the model returns, whichever stage makes it.
        needed = dict.fromkeys([*boundary.inputs, *(traced.outputs if stage == last else ())])
        for name in needed:
            if source_of[name] != stage:
                carried.setdefault((source_of[name], stage), []).append(name)
    return tuple(
        StageEdge(
            source,
            target,
            tuple(names),
            tuple(n for n in names if n not in traced.inputs and traced.value(n).requires_grad),
            takes_target=(source, target) == (0, last),
        )
        for (source, target), names in sorted(carried.items())
    )
