"""Counter-based random numbers of a trial: a hash of its seed, its step, the call and the element.

There is no generator state, so a trial draws the same numbers with any other trials in the array, on any
device, inside or outside of a CUDA graph.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from plait.fusion.errors import FusionError, user_line

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 32) - 1
# Of the types in which a number of 24 bits would be rounded to 1.
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}
# The most numbers of all trials that are computed before they are asked for, of 4 bytes each.
_MOST_AHEAD = 1 << 20
# A count of draws, of all trials or of each.
Count = int | tuple[int, ...]
# The draws before one, and the number of its elements in a trial.
Draw = tuple[Count, int]
# The draws from where one kind of calls begins to where the next one does.
_APART = 1 << 28


# What one fused module draws should not be what another one does.
_unused_seeds = itertools.count()


def unused_seeds(trials: int) -> list[int]:
    """Seeds that no fused module of this process was given before, unless by its user."""
    return list(itertools.islice(_unused_seeds, trials))


class Mask(NamedTuple):
    """What determines which elements each trial keeps in a dropout, and what these are multiplied by.

    The two keys are of each trial, and of the call is what they are combined with. Numbers below the `level`
    are dropped; it and the `scale` are one for all trials, or tensors with one each.
    """

    keys: tuple[Tensor, Tensor]
    of_call: tuple[int, int]
    level: int | Tensor
    scale: float | Tensor


class Calls:
    """Where the draws of each call begin, so that none of a step repeats those of another.

    Those of a training forward are the first. Calls before it, after it, and forwards and other calls in
    evaluation have separate parts of the streams, in which each call goes on where the last one ended.
    """

    def __init__(self) -> None:
        # Where the part of the last call begins, and where that call has ended.
        self._first = 0
        self._reached: Count = 0
        self.begin_step()

    def begin_step(self, follows_forward: bool = False) -> None:
        """A step was ended by its update, or its training forward has ended, or the trials have changed."""
        # Whether the training forward of the step has been.
        self.follows_forward = follows_forward
        # Of the parts, where the last call in each has ended.
        self._ends: dict[int, Count] = {}

    def begin(self, training: bool, is_forward: bool, before: Count | None) -> Count:
        """Where a call of a module that is `training` or not begins.

        `before` is the number of draws that earlier stages have made in the same call; None: it follows the
        last call.
        """
        if training:
            kind = 0 if is_forward else 1 + self.follows_forward
        else:
            kind = 3 + is_forward
        self._first = kind * _APART
        if before is None:
            return self._ends.get(self._first, self._first)
        return _shifted(before, self._first) if before else self._first

    def end(self, reached: Count) -> None:
        """Note where the call has ended."""
        self._ends[self._first] = self._reached = reached

    @property
    def draws(self) -> Count:
        """How many draws the last call has made, with those of `before`."""
        return _shifted(self._reached, -self._first)


def _shifted(count: Count, by: int) -> Count:
    return count + by if isinstance(count, int) else tuple(each + by for each in count)


class Streams:
    """The random streams of K trials during one forward.

    `seeds` and `rng_steps` hold one int64 per trial; a step counts the trial's training forwards.
    `calls` counts the draws of this forward, so that two dropouts differ; it is one count per trial if trials
    ran one by one with different numbers of draws. `after` are the streams of the forward before, which
    probably made the same draws.
    """

    def __init__(
        self, seeds: Tensor, rng_steps: Tensor, calls: Count = 0, after: Streams | None = None
    ) -> None:
        self.seeds = seeds
        self.rng_steps = rng_steps
        self.calls = calls
        # How often other generators were seeded in this forward.
        self.seeded = 0
        # Whether activation checkpointing is recomputing.
        self.is_repeated = False
        self._keys: tuple[Tensor, Tensor] | None = None
        # The draws of this forward and of the last one with any; those that both of the last two have made.
        self._made: list[Draw] = []
        self._before: list[Draw] = [] if after is None else after._made or after._before
        self._expected: list[Draw] = [] if after is None else after._expected
        if after is not None and after._made:
            before = set(after._before)
            self._expected = [draw for draw in after._made if draw in before]
        self._ahead: dict[Draw, Tensor] | None = None

    def bits(self, shape: tuple[int, ...]) -> Tensor:
        """32 random bits as int32 for each trial and element, of shape (trials, *shape)."""
        keys = self._keys_of_forward()
        if self._ahead is None:
            self._ahead = self._expected_bits(keys)
        draw = self.calls, math.prod(shape)
        self._made.append(draw)
        bits = self._ahead.pop(draw, None)
        if bits is None:
            return _bits(*self._next_keys(), shape)
        self._count()
        return bits.view(len(self.seeds), *shape)

    def _keys_of_forward(self) -> tuple[Tensor, Tensor]:
        if torch._C._current_graph_task_id() != -1 and not self.is_repeated:
            raise FusionError(
                f"{user_line()}\n  draws random numbers in backward, where trials have no streams; "
                f"draw them in forward"
            )
        if self._keys is None:
            self._keys = _keys(self.seeds, self.rng_steps)
        return self._keys

    def _next_keys(self) -> tuple[Tensor, Tensor]:
        """The offset and the factor of each trial's next draw, which is counted."""
        keys = self._keys_of_forward()
        offset, factor = (key ^ self._call_key(number) for number, key in enumerate(keys))
        self._count()
        return offset, factor

    def _expected_bits(self, keys: tuple[Tensor, Tensor]) -> dict[Draw, Tensor]:
        """All draws that are expected, computed at once: each by itself takes a dozen launches."""
        sizes = [size for _, size in self._expected]
        few = 0 < sum(sizes) * len(self.seeds) <= _MOST_AHEAD
        # Fake tensors must not be cached, and a CUDA graph cannot contain the copy to the device.
        is_real = type(keys[0]) is Tensor
        captures = self.seeds.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (few and is_real) or captures or any(type(calls) is not int for calls, _ in self._expected):
            return {}
        counter, *call_keys = _counters(tuple(self._expected), self.seeds.device)
        offset, factor = (key.unsqueeze(1) ^ of_call for key, of_call in zip(keys, call_keys))
        return dict(zip(self._expected, _scrambled(counter, offset, factor).split(sizes, 1)))

    def of_trial(self, trial: int, after: Streams | None = None) -> Streams:
        """The stream of one trial, at its current position; `after` is one of the forward before."""
        one = slice(trial, trial + 1)
        calls = self.calls if isinstance(self.calls, int) else self.calls[trial]
        made = self._like(self.seeds[one], self.rng_steps[one], calls, after)
        if self._keys is None:
            self._keys = _keys(self.seeds, self.rng_steps)
        made._keys = self._keys[0][one], self._keys[1][one]
        return made

    def repeated(self) -> Streams:
        """The streams at their current position, for recomputation in backward."""
        made = self._like(self.seeds.clone(), self.rng_steps.clone(), self.calls)
        made.is_repeated = True
        return made

    def _like(self, seeds: Tensor, rng_steps: Tensor, calls: Count, after: Streams | None = None) -> Streams:
        made = Streams(seeds, rng_steps, calls, after)
        made.is_repeated, made.seeded = self.is_repeated, self.seeded
        return made

    def follow(self, streams: list[Streams]) -> None:
        """Continue where the streams of the single trials ended."""
        counts = tuple(one.calls for one in streams if isinstance(one.calls, int))
        self.calls = counts[0] if len(set(counts)) == 1 else counts
        self.seeded = max(one.seeded for one in streams)

    def number(self) -> int:
        """A seed for other generators from the stream of one trial, another one each time."""
        calls = self.calls if isinstance(self.calls, int) else self.calls[0]
        offset, factor = (int(key) & _WORD for key in self._keys or _keys(self.seeds, self.rng_steps))
        self.seeded += 1
        return (offset << 31 ^ factor ^ _mix(calls) ^ _mix(self.seeded) << 20) & ((1 << 63) - 1)

    def _call_key(self, number: int) -> int | Tensor:
        if isinstance(self.calls, int):
            return _signed(_mix(self.calls * 2 + number))
        return _call_keys(self.calls, number, self.seeds.device)

    def _count(self) -> None:
        counts = self.calls
        self.calls = counts + 1 if isinstance(counts, int) else tuple(calls + 1 for calls in counts)

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers in [0, 1) with 24 random bits, or as many as the type has, of shape (trials, *shape)."""
        if dtype.is_complex:
            return torch.complex(*(self.uniform(shape, dtype.to_real()) for _ in range(2)))
        digits = _DIGITS.get(dtype, 24)
        wide = torch.promote_types(dtype, torch.float32)
        return (((self.bits(shape) >> 32 - digits) & (1 << digits) - 1).to(wide) * 2.0**-digits).to(dtype)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers by the Box-Muller transform, of shape (trials, *shape)."""
        if dtype.is_complex:
            return torch.complex(*(self.normal(shape, dtype.to_real()) for _ in range(2))) * math.sqrt(0.5)
        wide = torch.promote_types(dtype, torch.float32)
        radius = (-2.0 * torch.log1p(-self.uniform(shape, wide))).sqrt()
        angle = self.uniform(shape, wide) * (2.0 * math.pi)
        return (radius * angle.cos()).to(dtype)

    def integers(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Whole numbers from `low` to before `high`, of shape (trials, *shape)."""
        count = high - low
        if not 0 < count < 1 << 62:
            raise FusionError(f"random integers: found {count} from {low} on, expected 1 to 2**62")
        words = self.bits(shape).to(torch.int64) & _WORD
        if count < 1 << 31:
            return (words * count >> 32) + low
        return ((words << 31) | (self.bits(shape).to(torch.int64) & (1 << 31) - 1)) % count + low

    def keep(self, shape: tuple[int, ...], chance: float | tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """The dropout mask: 1 / (1 - p) or 0 per element, where p is the `chance` to drop it."""
        threshold, scale = _thresholds(chance, len(shape), self.seeds.device, dtype)
        before = self.calls
        mask = (self.bits(shape) >= threshold).to(dtype).mul_(scale)
        self._uncount(before, chance)
        return mask

    def mask(self, chance: float | tuple[float, ...]) -> Mask | None:
        """What determines the next dropout mask, for a kernel; None if trials have made unlike draws."""
        calls = self.calls
        if not isinstance(calls, int):
            return None
        level, scale = _thresholds(chance, 0, self.seeds.device, torch.float32)
        of_call = (_signed(_mix(calls * 2)), _signed(_mix(calls * 2 + 1)))
        made = Mask(self._keys_of_forward(), of_call, level, scale)
        self._count()
        self._uncount(calls, chance)
        return made

    def dropout_keys(self, chance: tuple[float, ...]) -> Tensor:
        """What `is_kept` needs to know of the next dropout mask, for kernels that compute it themselves."""
        threshold, _ = _thresholds(chance, 0, self.seeds.device, torch.float32)
        before = self.calls
        offset, factor = self._next_keys()
        self._uncount(before, chance)
        least = threshold if isinstance(threshold, Tensor) else torch.full_like(offset, threshold)
        return torch.stack((offset, factor | 1, least), 1)

    def _uncount(self, before: Count, chance: float | tuple[float, ...]) -> None:
        """Do not count a draw of trials that drop nothing, which they do not make alone."""
        chances = (chance,) * len(self.seeds) if isinstance(chance, float) else chance
        if 0.0 in chances:
            pairs = [(n,) * len(chances) if isinstance(n, int) else n for n in (before, self.calls)]
            counts = tuple(old if p == 0.0 else new for old, new, p in zip(*pairs, chances))
            self.calls = counts[0] if len(set(counts)) == 1 else counts


def is_kept(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The elements that a dropout with these keys keeps, of shape (trials, *shape)."""
    offset, factor, least = keys.unbind(1)
    return _bits(offset, factor, shape) >= least.view(-1, *(1,) * len(shape))


def _bits(offset: Tensor, factor: Tensor, shape: tuple[int, ...]) -> Tensor:
    counter = torch.arange(math.prod(shape), dtype=torch.int32, device=offset.device)
    return _scrambled(counter, offset.unsqueeze(1), factor.unsqueeze(1)).view(len(offset), *shape)


@lru_cache(maxsize=16)
def _counters(draws: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, ...]:
    """The number of each element within its draw, and the two keys of its call."""
    sizes = torch.tensor([size for _, size in draws])
    keys = [[_signed(_mix(calls * 2 + number)) for calls, _ in draws] for number in (0, 1)]
    of_calls = [torch.tensor(each, dtype=torch.int32).repeat_interleave(sizes) for each in keys]
    counter = torch.cat([torch.arange(size, dtype=torch.int32) for _, size in draws])
    return tuple(each.to(device) for each in (counter, *of_calls))


@lru_cache(maxsize=1024)
def _call_keys(calls: tuple[int, ...], number: int, device: torch.device) -> Tensor:
    """One key per trial; cached, since a CUDA graph cannot contain the copy to the device."""
    keys = [_signed(_mix(each * 2 + number)) for each in calls]
    return torch.tensor(keys, dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _thresholds(
    chance: float | tuple[float, ...], dims: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor | int, Tensor | float]:
    chances = (chance,) if isinstance(chance, float) else chance
    if any(not 0.0 <= p <= 1.0 for p in chances):
        raise FusionError(f"dropout: found p = {chance}, expected values between 0 and 1")
    # p = 1 keeps one element in 2**32, which the scale of 0 drops too.
    levels = [min(round(p * 2**32), _WORD) - 2**31 for p in chances]
    scales = [1.0 / (1.0 - p) if p < 1.0 else 0.0 for p in chances]
    if len(chances) == 1:
        return levels[0], scales[0]
    shape = (len(chances),) + (1,) * dims
    return (
        torch.tensor(levels, dtype=torch.int32, device=device).view(shape),
        torch.tensor(scales, dtype=dtype, device=device).view(shape),
    )


def _keys(seeds: Tensor, rng_steps: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys per trial, by the finalizer of splitmix64 over seed and step."""
    word = seeds * _signed64(_GOLDEN) + rng_steps * _signed64(0xD1B54A32D192ED03) + 1
    word = (word ^ ((word >> 30) & ((1 << 34) - 1))) * _signed64(0xBF58476D1CE4E5B9)
    word = (word ^ ((word >> 27) & ((1 << 37) - 1))) * _signed64(0x94D049BB133111EB)
    word = word ^ ((word >> 31) & ((1 << 33) - 1))
    return word.to(torch.int32), (word >> 32).to(torch.int32)


def _scrambled(counter: Tensor, offset: Tensor, factor: Tensor) -> Tensor:
    """The finalizer of murmur3 on each counter, by the keys; shifts of signed integers need a mask."""
    bits = counter * (factor | 1)
    bits += offset
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _signed(0x85EBCA6B)
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= _signed(0xC2B2AE35)
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _mix(number: int) -> int:
    """The finalizer of murmur3 on one Python int."""
    word = (number + 1) * 0x9E3779B1 & _WORD
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _WORD
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _WORD
    return word ^ (word >> 16)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _signed64(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
