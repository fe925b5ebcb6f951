"""The plain model of one trial, which fused trials are compared with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.core.errors import PlaitError
from plait.fusion.errors import FusionError
from plait.fusion.verify.candidates import Candidate
from plait.fusion.verify.fused_step import numbers_in
from plait.fusion.verify.plain_run import PlainRun
from plait.verification import Observation
from plait.verification.module_trace import ModuleTrace
from plait.verification.verify import Phase, Reference

# The relative size of the perturbation of the trials' weights.
_PERTURBATION = 0.01
# How many numbers are drawn for it; larger weights repeat them. A prime, so that rows differ.
_DRAWN = 4093


class PlainModelFailed(Exception):
    """A plain model raises an error."""

    def __init__(self, trial: int, why: str) -> None:
        super().__init__(why)
        self.trial = trial


class PlainTrial(Reference):
    """The plain model of one trial, with the random numbers that it draws in an array with these `unfused`.

    `observable` selects what exists for the fused form, too.
    """

    def __init__(
        self,
        candidate: Candidate,
        trial: int,
        phases: Sequence[Phase],
        unfused: Mapping[str, str],
        observable: Callable[[Observation], Observation],
    ) -> None:
        model, seed = candidate.models[trial], 1000 * (trial + 1)
        super().__init__(model, phases, seed=seed, rounding=candidate.rounding)
        self._candidate, self._trial, self._unfused = candidate, trial, unfused
        self._observable = observable

    def begin(self) -> None:
        candidate, trial = self._candidate, self._trial
        candidate.prepare(trial)
        for name, parameter in self.model.named_parameters():
            perturb_trial(parameter, parameter.data, name, trial)
        self._plain_run = PlainRun(
            self.model, candidate.seeds[trial], candidate.rng_steps[trial], self._unfused
        )

    def forward(self, phase: Phase) -> tuple[Any, Tensor]:
        # Do not call train() in training, as submodules may be in evaluation mode on purpose.
        if phase.training != self.model.training:
            self.model.train(phase.training)
        with self._plain_run.forward():
            return self._candidate.alone(self._trial, phase.batch)

    def visible(self, observed: Observation) -> Observation:
        return self._observable(observed)

    def run(
        self, seed: int | None = None, until: int | None = None, trace: ModuleTrace | None = None
    ) -> Iterator[Observation]:
        """Run each phase, including Python numbers; stops early if evaluation raises an error."""
        done = 0
        try:
            for step in super().run(seed, until, trace):
                done += 1
                yield {**step, **numbers_in(self.model)}
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # the user's code can raise anything
            if not self.phases[done].training:
                return  # its forward may need gradients, for example
            if isinstance(failure, PlaitError):
                raise
            raise PlainModelFailed(self._trial, first_line(failure)) from failure


def perturb_trial(parameter: Tensor, values: Tensor, name: str, trial: int) -> None:
    """Perturb one trial's values of a trained parameter, seeded by its name and the trial.

    With identical weights, mixing up trials would go unnoticed.
    """
    if not trial or not parameter.requires_grad or not parameter.is_floating_point():
        return
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {trial}".encode()))
    with torch.no_grad():
        few = torch.randn(min(_DRAWN, values.numel()), generator=generator).to(values)
        times = -(-values.numel() // max(1, len(few)))
        drawn = few.repeat(times)[: values.numel()].view(values.shape)
        values.add_(drawn * values.abs().mean().clamp(min=1e-3), alpha=_PERTURBATION)


def first_line(failure: BaseException) -> str:
    """The error in one line, without the advice of a FusionError."""
    text = failure.what if isinstance(failure, FusionError) else str(failure)
    text = text.strip() or type(failure).__name__
    line = " ".join(part.strip() for part in text.splitlines()[:2])
    line = line if isinstance(failure, PlaitError) else f"{type(failure).__name__}: {line}"
    return line if len(line) <= 300 else f"{line[:297]}..."
