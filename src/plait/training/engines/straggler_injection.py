"""Injected delays: some workers run as if their device were slower, some sleep at random."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plait.schema.settings import SlowSettings


class StragglerInjector:
    """Makes steps of this worker longer, deterministically by the settings and the seed."""

    def __init__(self, settings: SlowSettings, rank: int, seed: int) -> None:
        self._factor = settings.factors.get(rank, 1.0)
        self._probability, self._sleep_s = settings.jitter or (0.0, 0.0)
        self._draws = random.Random(f"{seed}/{rank}")
        self.active = self._factor > 1 or self._probability > 0

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Slow down the body by the factor of this worker, and sleep with the set probability."""
        if not self.active:
            yield
            return
        started = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        extra_s = (self._factor - 1) * (time.perf_counter() - started)
        if self._draws.random() < self._probability:
            extra_s += self._sleep_s
        time.sleep(extra_s)
