"""The one verification: a candidate against its reference, phase after phase, mended, and compared again.

A *reference* is a plain model. A *candidate* is what was built of it: one of several fused trials, stages, or
both. The two take the same phases, from the same state and with the same random numbers, and what can be seen
of each (outputs, loss, gradients, buffers) must agree up to rounding. Where it does not, the first module at
which they differ is located; whoever has built the candidate mends it there, and all is compared again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from plait.verification.borrowed import borrowed
from plait.verification.compare import (
    Difference,
    Noise,
    find_differences,
    measure_noise,
    perturb_in_place,
)
from plait.verification.observe import Observation, observe_step, same_random_numbers
from plait.verification.trace import ModuleTrace, differing_keys


class Phase(NamedTuple):
    """One forward, with backward where it is in training mode, on the first or the second batch."""

    training: bool
    batch: int

    @property
    def mode(self) -> str:
        return "training" if self.training else "evaluation"


@dataclass(frozen=True)
class Mismatch:
    """What a candidate does otherwise than its reference, in words, and the module to blame, where known.

    `differences` are those of the first `phase` in which there are any, of the first such `trial`.
    """

    why: str
    module: str | None = None
    phase: int = 0
    trial: int = 0
    differences: Sequence[Difference] = ()

    def __str__(self) -> str:
        return self.why


M = TypeVar("M", bound=Mismatch)


class NotRepeatableError(Exception):
    """A reference that does something else when it is run again: nothing can be compared with it."""

    def __init__(self, phase: int, difference: Difference) -> None:
        super().__init__(str(difference))
        self.phase, self.difference = phase, difference


class Reference(ABC):
    """A plain model that takes phases from the state it has, as often as needed, and is left as it was.

    `held` is what keeps state besides the model: its loss. Random numbers of the first phase start from
    `seed`. `rounding` is that of the coarsest numbers which are computed with, where not the weights' own.
    """

    def __init__(
        self,
        model: nn.Module,
        phases: Sequence[Phase],
        held: Any = None,
        seed: int = 0,
        rounding: float = 0.0,
    ) -> None:
        self.model, self.phases = model, phases
        self._held, self._seed, self._rounding = held, seed, rounding

    def begin(self) -> None:  # noqa: B027  (most need nothing)
        """Called before the first phase of each run."""

    @abstractmethod
    def forward(self, phase: Phase) -> tuple[Any, Tensor | None]:
        """The outputs of a phase, and the loss to differentiate."""

    def visible(self, observed: Observation) -> Observation:
        """What of an observation a candidate can show, too."""
        return observed

    def run(
        self, seed: int | None = None, until: int | None = None, trace: ModuleTrace | None = None
    ) -> Iterator[Observation]:
        """What the model does in each phase up to `until`, in which `trace` watches.

        With a `seed` it begins with weights that are rounded otherwise.
        """
        last = len(self.phases) - 1 if until is None else until
        with borrowed(self.model, self._held):
            self.begin()
            if seed is not None:
                perturb_in_place(self.model.parameters(), seed, self._rounding)
            for number, phase in enumerate(self.phases[: last + 1]):
                # Casts of weights are kept while autocast is on, and these are other weights now.
                torch.clear_autocast_cache()
                watched = trace if trace is not None and number == last else nullcontext()
                with same_random_numbers(self._seed + number), watched:
                    step = observe_step(self.model, partial(self.forward, phase), phase.training)
                yield step

    def observe(self, phase: int, seed: int | None = None) -> Observation:
        """What the model does in one phase, after those before it."""
        return self.visible(deque(self.run(seed, phase), maxlen=1)[0])

    def trace(self, phase: int, seed: int | None = None) -> ModuleTrace:
        """What the modules of the model do in one phase."""
        trace = ModuleTrace([self.model])
        deque(self.run(seed, phase, trace), maxlen=0)
        return trace


def first_differences(
    reference: Reference,
    expected: Sequence[Observation],
    found: Iterable[Observation],
    noise: dict[int, Noise] | None = None,
) -> tuple[int, Sequence[Difference]] | None:
    """The first phase in which a candidate differs from what is `expected` by more than rounding, and where.

    What is `found` of the candidate is asked for phase by phase. `noise` is what is known of rounding in
    each phase; where that does not explain a difference, it is measured. Raises NotRepeatableError.
    """
    noise = {} if noise is None else noise
    for phase, (complete, own) in enumerate(zip(expected, found)):
        wanted = reference.visible(complete)
        differences = find_differences(wanted, own, noise.get(phase, Noise({})))
        if differences:
            if find_differences(wanted, reference.observe(phase), Noise({})):
                # Its noise would hide whatever is wrong.
                raise NotRepeatableError(phase, differences[0])
            noise[phase] = measure_noise(wanted, partial(reference.observe, phase))
            differences = find_differences(wanted, own, noise[phase])
        if differences:
            return phase, differences
    return None


def locate(
    reference: Reference, phase: int, found: ModuleTrace, kinds: Sequence[str] = ("values",)
) -> tuple[str, list[str]] | None:
    """The first of `kinds` (`values`, `gradients`) in which modules of a candidate differ, and their keys."""
    expected = reference.trace(phase)
    moved = [reference.trace(phase, seed) for seed in range(2)]
    each = ((kind, differing_keys(expected, moved, found, kind)) for kind in kinds)
    return next(((kind, keys) for kind, keys in each if keys), None)


def verify(find: Callable[[], M | None], mend: Callable[[M], bool], attempts: int) -> M | None:
    """Mend a candidate until it computes what its reference computes; None then, or else what is left.

    `mend` says whether it has changed anything, so that comparing again may help.
    """
    mismatch: M | None = None
    for _ in range(attempts):
        mismatch = find()
        if mismatch is None or not mend(mismatch):
            break
    return mismatch
