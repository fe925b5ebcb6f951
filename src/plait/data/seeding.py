"""Seeds of samples, steps and trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plait.data.generators import GENERATORS, kept_generators


def mix(*numbers: int) -> int:
    """A 63-bit hash of `numbers` (splitmix64 over each of them)."""
    return mix_further(0, *numbers) >> 1


def mix_further(state: int, *numbers: int) -> int:
    """The 64 bits of which `mix` has 63, for numbers that follow those of `state`."""
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def seed_all(number: int) -> None:
    """Seed all random number generators that model and data code may use."""
    for generator in GENERATORS:
        generator.seed(number)


def seed_factory(seed: int) -> None:
    """Seed the random numbers that a factory draws by `seed` only.

    So it draws the same on every worker, and for both splits: parts of `random_split` have nothing in common.
    """
    # Unlike `seed_all`, also for GPUs that are not in use yet. On a build for CPUs this would only record
    # stack traces, a millisecond each time.
    if torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(mix(seed))
    seed_all(mix(seed))


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Within it, draws and seeds change no generator: all are as before at its end."""
    gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with kept_generators():
            yield
    finally:
        if gpu_states:
            torch.cuda.set_rng_state_all(gpu_states)
