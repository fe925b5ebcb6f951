"""Which values each stage sends to which later stage, directly, also past other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.profiler.traced_model import TracedModel


@dataclass(frozen=True)
class StageEdge:
    """Values that stage `source` sends to stage `target`; it receives the gradients of `grad_names`.

    Stage 0 has the data loader, so it also sends the model inputs that later stages need, and the batch's
    target (`takes_target`), which the last stage needs for the loss.
    """

    source: int
    target: int
    names: tuple[str, ...]
    grad_names: tuple[str, ...]
    takes_target: bool = False


def find_routes(traced: TracedModel, stages: Sequence[Sequence[str]]) -> tuple[StageEdge, ...]:
    """All edges between `stages` (layers of each), sorted by source, then target."""
    boundaries = [traced.boundary(traced.select(ids)) for ids in stages]
    source_of = dict.fromkeys(traced.inputs, 0)
    source_of |= {name: s for s, boundary in enumerate(boundaries) for name in boundary.outputs}
    last = len(stages) - 1
    carried: dict[tuple[int, int], list[str]] = {(0, last): []} if last else {}
    for stage, boundary in enumerate(boundaries):
        # The loss needs all outputs of the model, whichever stage computes them.
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
