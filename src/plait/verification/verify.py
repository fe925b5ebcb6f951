"""Verification: compares a candidate with its reference, corrects it, and compares again.

A *reference* is a plain model. A *candidate* is what was built from it: one of several fused trials, stages,
or both. The two run the same phases, from the same state and with the same random numbers, and their
observations (outputs, loss, gradients, buffers) must agree up to rounding. If they do not, the first module
at which they differ is located, the caller corrects the candidate there, and all is compared again.
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

from plait.verification.compare import (
    Difference,
    Noise,
    find_differences,
    measure_noise,
    perturb_in_place,
)
from plait.verification.module_trace import ModuleTrace, differing_keys
from plait.verification.observe import Observation, observe_step, same_random_numbers
from plait.verification.restored_state import borrowed


class Phase(NamedTuple):
    """One forward, with backward in training mode, on the first or the second batch."""

    training: bool
    batch: int

    @property
    def mode(self) -> str:
        return "training" if self.training else "evaluation"


@dataclass(frozen=True)
class Mismatch:
    """How a candidate differs from its reference, as text, and the module at fault, if known.

    `differences` are those of the first `phase` and `trial` that have any.
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
    """A reference that gives different results when it is run again, so that nothing can be compared."""

    def __init__(self, phase: int, difference: Difference) -> None:
        super().__init__(str(difference))
        self.phase, self.difference = phase, difference


class Reference(ABC):
    """A plain model that runs phases from its current state, any number of times, and is restored.

    `held` is other stateful objects: the loss. Random numbers of the first phase start from `seed`.
    `rounding` is the precision of the computation, if coarser than that of the weights.
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
        self._held, self._seed, self.rounding = held, seed, rounding

    def begin(self) -> None:  # noqa: B027  (most need nothing)
        """Called before the first phase of each run."""

    @abstractmethod
    def forward(self, phase: Phase) -> tuple[Any, Tensor | None]:
        """The outputs of a phase, and the loss to differentiate."""

    def visible(self, observed: Observation) -> Observation:
        """The part of an observation that candidates have too."""
        return observed

    def run(
        self, seed: int | None = None, until: int | None = None, trace: ModuleTrace | None = None
    ) -> Iterator[Observation]:
        """Run each phase up to `until`, which `trace` records.

        With a `seed`, start from perturbed weights.
        """
        last = len(self.phases) - 1 if until is None else until
        with borrowed(self.model, self._held):
            self.begin()
            if seed is not None:
                perturb_in_place(self.model.parameters(), seed, self.rounding)
            for number, phase in enumerate(self.phases[: last + 1]):
                # Autocast caches casts of weights, and these are different weights.
                torch.clear_autocast_cache()
                watched = trace if trace is not None and number == last else nullcontext()
                with same_random_numbers(self._seed + number), watched:
                    step = observe_step(self.model, partial(self.forward, phase), phase.training)
                yield step

    def observe(self, phase: int, seed: int | None = None) -> Observation:
        """The observation of one phase, after running the earlier ones."""
        return self.visible(deque(self.run(seed, phase), maxlen=1)[0])

    def trace(self, phase: int, seed: int | None = None) -> ModuleTrace:
        """The trace of the modules in one phase."""
        trace = ModuleTrace([self.model])
        deque(self.run(seed, phase, trace), maxlen=0)
        return trace


def first_differences(
    reference: Reference,
    expected: Sequence[Observation],
    actual: Iterable[Observation],
    noise: dict[int, Noise] | None = None,
) -> tuple[int, Sequence[Difference]] | None:
    """The first phase in which a candidate differs from `expected` beyond rounding, and the differences.

    `actual` yields the candidate's observations phase by phase. `noise` is the known rounding error of each
    phase; if it does not explain a difference, it is measured. Raises NotRepeatableError.
    """
    noise = {} if noise is None else noise
    for phase, (complete, observed) in enumerate(zip(expected, actual)):
        wanted = reference.visible(complete)
        differences = find_differences(wanted, observed, noise.get(phase, Noise({})))
        if differences:
            if find_differences(wanted, reference.observe(phase), Noise({})):
                # Its noise would hide any error.
                raise NotRepeatableError(phase, differences[0])
            noise[phase] = measure_noise(wanted, partial(reference.observe, phase), reference.rounding)
            differences = find_differences(wanted, observed, noise[phase])
        if differences:
            return phase, differences
    return None


def locate(
    reference: Reference, phase: int, actual: ModuleTrace, kinds: Sequence[str] = ("values",)
) -> tuple[str, list[str]] | None:
    """The first of `kinds` (`values`, `gradients`) in which a candidate's modules differ, and their keys."""
    expected = reference.trace(phase)
    moved = [reference.trace(phase, seed) for seed in range(2)]
    rounding = reference.rounding
    each = ((kind, differing_keys(expected, moved, actual, kind, rounding)) for kind in kinds)
    return next(((kind, keys) for kind, keys in each if keys), None)


def verify(find: Callable[[], M | None], mend: Callable[[M], bool], attempts: int) -> M | None:
    """Correct a candidate until it equals its reference; returns None, or the remaining mismatch.

    `mend` returns whether it has changed anything, so that comparing again may help.
    """
    mismatch: M | None = None
    for _ in range(attempts):
        mismatch = find()
        if mismatch is None or not mend(mismatch):
            break
    return mismatch
