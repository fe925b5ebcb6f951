"""Seeds of samples, steps and trials, and the random number generators that they seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor


def mix(*numbers: int) -> int:
    """A 63-bit hash of `numbers` (splitmix64 over each of them)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_all(number: int) -> None:
    """Seed all random number generators that model and data code may use."""
    # torch.manual_seed would record a stack trace for uninitialized GPUs, a millisecond each time.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    random.seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def random_states() -> tuple[Tensor, Any, Any]:
    """The state of the generators of torch, Python and numpy."""
    return torch.default_generator.get_state(), random.getstate(), numpy.random.get_state(legacy=True)


def same_states(before: tuple[Tensor, Any, Any], after: tuple[Tensor, Any, Any]) -> bool:
    """Whether two results of `random_states` are equal."""
    (kind, keys, *rest), (kind_now, keys_now, *rest_now) = before[2], after[2]
    return (
        torch.equal(before[0], after[0])
        and before[1] == after[1]
        and (kind, rest) == (kind_now, rest_now)
        and bool((keys == keys_now).all())
    )


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Within it, draws and seeds change no generator: all are as before at its end."""
    torch_state, python_state, numpy_state = random_states()
    gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if gpu_states:
            torch.cuda.set_rng_state_all(gpu_states)
