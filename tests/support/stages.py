"""Models cut in two within one process, compared with themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from plait.pipeline.cutting.check_model import check_buffers, check_stages
from plait.pipeline.cutting.cut import StageModule, cut
from plait.profiler.traced_model import TracedModel

Loss = Callable[[Any, Any], Tensor]


def cut_all(traced: TracedModel, stages: Sequence[Sequence[str]]) -> tuple[StageModule, ...]:
    """All stages, checked: every layer is in exactly one, and values flow only to later stages."""
    check_stages(traced, stages)
    check_buffers(traced, stages)
    return tuple(cut(traced, ids) for ids in stages)
