"""The number formats of a run's weights and arithmetic."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from plait.schema.settings import TrainSettings

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(settings: TrainSettings) -> torch.dtype | None:
    """The dtype of weights and batches; None if they are not converted."""
    return torch.float64 if settings.precision == "float64" else None


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context of forwards."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, AUTOCAST[precision])


def emulated(precision: str, device: torch.device) -> str | None:
    """The warning for a user whose processor computes `precision` in software; None where it does not."""
    if precision != "bf16" or device.type != "cpu" or _has_bf16():
        return None
    # Torch warns too, but without saying what to do.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return "precision: this processor has no bf16 arithmetic, so it is emulated; float32 is faster here"


def _has_bf16() -> bool:
    """Whether the processor has bf16 instructions; True where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(text.split())
