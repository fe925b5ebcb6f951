"""The global random number generators: their seeds and states, and whether they were drawn from.

To read and compare the states of Python's and numpy's takes longer than to load a small batch, so their
memory is compared instead, and a state is only read if it has changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

# What the functions of the modules draw from.
_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: numpy.random.RandomState = numpy.random.random_sample.__self__  # type: ignore[attr-defined]
# A Mersenne Twister: 624 words and a position, which numpy has behind them and Python before them.
_WORDS = 624
_TWISTER_BYTES = 4 * (_WORDS + 1)


@dataclass(eq=False)
class Generator:
    """One of the generators; `look` returns another value after each draw, and the same until then.

    `set` is given what `look` and `get` returned at the same time.
    """

    look: Callable[[], object]
    get: Callable[[], Any]
    set: Callable[[Any, Any], object]
    seed: Callable[[int], object]
    _known: tuple[object, Any] = field(default=(None, None))

    def state(self) -> tuple[object, Any]:
        """What `look` returns, and the state."""
        look = self.look()
        if self._known[0] != look:
            self._known = look, self.get()
        return self._known


@contextlib.contextmanager
def kept_generators(*chosen: Generator) -> Iterator[None]:
    """Context after which all generators, or those chosen, are as before; GPUs' are not looked at."""
    kept = [(generator, *generator.state()) for generator in chosen or GENERATORS]
    try:
        yield
    finally:
        for generator, look, state in kept:
            if generator.look() != look:
                generator.set(look, state)


def _seed_torch(number: int) -> None:
    # torch.manual_seed would record a stack trace for uninitialized GPUs, a millisecond each time.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _look_at_torch() -> object:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _look_at_python(generator: random.Random = _PYTHON) -> object:
    if not _memory_shows_draws():
        return generator.getstate()
    return _memory(generator), generator.gauss_next  # type: ignore[attr-defined]


def _look_at_numpy(generator: numpy.random.RandomState = _NUMPY) -> object:
    twister = generator._bit_generator
    if not isinstance(twister, numpy.random.MT19937) or not _memory_shows_draws():
        return str(generator.get_state(legacy=False))
    # It has half of a pair of normal numbers itself.
    return _memory(generator), ctypes.string_at(twister.ctypes.state_address, _TWISTER_BYTES)


def _memory(value: object) -> bytes:
    """The memory of an object, without its type and reference count."""
    header = object.__basicsize__
    return ctypes.string_at(id(value) + header, type(value).__basicsize__ - header)


@functools.cache
def _memory_shows_draws() -> bool:
    """Whether the memory of generators changes with each draw here, and only then."""
    python, legacy = random.Random(0), numpy.random.RandomState(0)
    address = legacy._bit_generator.ctypes.state_address

    def look() -> tuple[bytes, ...]:
        return _memory(python), _memory(legacy), ctypes.string_at(address, _TWISTER_BYTES)

    for draw in (python.random, legacy.random_sample, legacy.standard_normal, legacy.standard_normal):
        before = look()
        stays = before == look()
        draw()
        if not stays or before == look():
            return False
    return True


def _seed_numpy(number: int) -> None:
    numpy.random.seed(number & 0xFFFFFFFF)


def _set_numpy(look: Any, state: Any) -> None:
    """Set numpy's generator back; by its memory if only its Twister has changed, a hundred times faster."""
    if isinstance(look, tuple) and look[0] == _memory(_NUMPY):
        ctypes.memmove(_NUMPY._bit_generator.ctypes.state_address, look[1], _TWISTER_BYTES)
    else:
        numpy.random.set_state(state)


GENERATORS = (
    Generator(
        _look_at_torch,
        torch.default_generator.get_state,
        lambda _, state: torch.default_generator.set_state(state),
        _seed_torch,
    ),
    Generator(_look_at_python, random.getstate, lambda _, state: random.setstate(state), random.seed),
    Generator(_look_at_numpy, lambda: numpy.random.get_state(legacy=False), _set_numpy, _seed_numpy),
)


def seed_sample(number: int) -> None:
    """Seed all generators for one sample.

    Those of torch and numpy as by their functions. Python's own way takes as long as to read a small sample,
    so it gets the words of numpy's in reverse order.
    """
    _seed_torch(number)
    _seed_numpy(number)
    views = _views(_NUMPY._bit_generator)
    if views is None:
        random.setstate((3, (*_words_of_numpy(number), _WORDS), None))
        return
    position, words, reverse = views
    position[0] = _WORDS
    words[:] = reverse
    _PYTHON.gauss_next = None  # type: ignore[attr-defined]


def _words_of_numpy(number: int) -> list[int]:
    """The words of numpy's generator in reverse order; of another kind than usual, those it would have."""
    twister = _NUMPY._bit_generator
    if not isinstance(twister, numpy.random.MT19937):
        twister = numpy.random.RandomState(number & 0xFFFFFFFF)._bit_generator
    words: list[int] = twister.state["state"]["key"][::-1].tolist()
    return words


@functools.cache
def _views(twister: object) -> tuple[Any, Any, Any] | None:
    """The memory of Python's position and words, and of those of `twister`, numpy's, in reverse order.

    None where they lie otherwise.
    """
    if not isinstance(twister, numpy.random.MT19937) or not _memory_shows_draws():
        return None
    *words, position = _PYTHON.getstate()[1]
    if numpy.frombuffer(_memory(_PYTHON), numpy.uint32, _WORDS + 1).tolist() != [position, *words]:
        return None
    python = _words_at(id(_PYTHON) + object.__basicsize__, _WORDS + 1)
    return python[:1], python[1:], _words_at(twister.ctypes.state_address, _WORDS)[::-1]


def _words_at(address: int, count: int) -> Any:
    return numpy.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))


def looks() -> list[object]:
    """Another value after each draw from any of them."""
    return [generator.look() for generator in GENERATORS]
