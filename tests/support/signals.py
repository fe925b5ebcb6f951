"""Signals for tests of policies: made up, without any process."""

from __future__ import annotations

from typing import Any

from plait.core.run_events import Signals


def signals_at(step: int, **values: Any) -> Signals:
    """Signals of four workers that take 0.1 s a step, but for `values`."""
    usual: dict[str, Any] = {
        "loss": 1.0,
        "batch_size": 64,
        "lr_factor": 1.0,
        "workers": 4,
        "sync": "all-reduce",
        "topology": "star",
        "step_s": 0.1,
        "samples_per_s": 640.0,
        "work_s": (0.08,) * 4,
        "link_bytes_per_s": (1e8,) * 4,
    }
    return Signals(step=step, **{**usual, **values})
