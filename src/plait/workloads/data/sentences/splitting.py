"""Selects sentences for testing by a hash of their text: the same in every run and corpus."""

from __future__ import annotations

import zlib


def is_test(text: str, fraction: float) -> bool:
    """Whether a sentence is in the `fraction` for testing."""
    return zlib.crc32(text.encode()) < fraction * 2**32
