"""Which sentences are for testing, by their text alone: the same in every run and corpus."""

from __future__ import annotations

import zlib


def is_test(text: str, fraction: float) -> bool:
    """Whether a sentence is one of the `fraction` that are for testing."""
    return zlib.crc32(text.encode()) < fraction * 2**32
