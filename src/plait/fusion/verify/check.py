"""Whether fused trials compute what the same trials compute alone; and if not, which module is to blame.

The trials run on real batches, fused and each alone, with the same random numbers: outputs, losses, the
gradient of every parameter, buffers and numbers that modules keep in Python must agree up to rounding, in
training and in evaluation. Where they do not, the first module at which they differ runs trial by trial, and
all is compared again. The fused trials are an array of their own, a trial alone is its model itself, which is
afterwards as it was before.
"""

from __future__ import annotations

import gc
import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.core.errors import PlaitError
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.verify.candidates import Candidate
from plait.fusion.verify.fused_step import (
    ATTRIBUTE,
    FusedStep,
    changes_in_python,
    is_within,
    numbers_in,
)
from plait.fusion.verify.lone_run import LoneRun
from plait.verification import (
    BUFFER,
    Difference,
    Noise,
    Observation,
    first_names,
    same_random_numbers,
)
from plait.verification.trace import IN_NONE, ModuleTrace, failed_in, path_of
from plait.verification.verify import (
    Mismatch,
    NotRepeatableError,
    Phase,
    Reference,
    first_differences,
    locate,
    verify,
)

log = logging.getLogger(__name__)

# Each twice in a row, so that what a model keeps is seen.
PHASES = (Phase(True, 0), Phase(True, 1), Phase(False, 0), Phase(False, 1))
# For trials of a kind of which others have been compared.
FEW_PHASES = (Phase(True, 0), Phase(False, 0))
# Modules that are tried one by one before the whole model runs trial by trial.
_ATTEMPTS = 12
# Longer than this, and than a few times the first comparison, no further modules are tried one by one.
_SEARCH_S, _SEARCH_TIMES = 20.0, 6.0
# How far, relative to their size, the weights of trials are set apart.
APART = 0.01
# How many numbers are drawn for it; they are repeated over larger weights, of which no side divides them.
_DRAWN = 4093
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_WHOLE = "the whole model"
_LOSS = "the loss"
_NOT_TWICE = (
    "a trial alone does something else when it is run again from the same state with the same random "
    "numbers: its forward goes by what is outside of the model (a global variable, a file, the time)"
)


class _FailsAlone(Exception):
    """A plain model that fails by itself."""

    def __init__(self, trial: int, why: str) -> None:
        super().__init__(why)
        self.trial = trial


@dataclass(frozen=True)
class Verdict:
    """What verification found: the modules that must run trial by trial, by name, and why.

    `refused` says why not even that helps; then each trial has to be trained alone. `has_python_state` says
    that modules keep numbers in Python that change from step to step, which no CUDA graph can hold. With
    `loss_alone` only the loss is computed trial by trial. `failed` are trials, by their places, that cannot
    take a step alone either, and why.
    """

    unfused: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None
    seconds: float = 0.0
    has_python_state: bool = False
    loss_alone: bool = False
    failed: Mapping[int, str] = field(default_factory=dict)


def verify_fused(
    candidate: Candidate, unfused: Mapping[str, str] | None = None, phases: Sequence[Phase] = PHASES
) -> Verdict:
    """Compare all trials, fused, with the same trials alone.

    Where memory is too short for a second array of all trials, they are compared in arrays of fewer.
    """
    start = time.perf_counter()
    found = _verify(candidate, dict(unfused or {}), phases, list(range(len(candidate.models))))
    return replace(found, seconds=time.perf_counter() - start)


def _verify(
    candidate: Candidate, unfused: dict[str, str], phases: Sequence[Phase], trials: list[int]
) -> Verdict:
    check = _Check(candidate, unfused, phases, trials)
    try:
        return check.verdict()
    except torch.OutOfMemoryError:
        pass  # the frames of what failed hold memory: go on outside of here
    del check
    gc.collect()
    torch.cuda.empty_cache()
    if len(trials) == 1:
        log.warning("fused trials were not verified: there is no memory for a second copy of one of them")
        return Verdict(unfused)
    half = len(trials) // 2
    first = _verify(candidate, unfused, phases, trials[:half])
    if first.refused is not None:
        return first
    return _verify(candidate, dict(first.unfused), phases, trials[half:])


def log_verdict(verdict: Verdict, known: Mapping[str, str]) -> None:
    """Log which modules run trial by trial, besides those `known` before."""
    for name, why in verdict.unfused.items():
        if name not in known:
            log.warning("%s runs trial by trial, which is slower: %s", name or _WHOLE, why)
    if verdict.refused is not None:
        log.warning("these trials are not fused, each trains alone: %s", verdict.refused)


class _Check:
    """One array of trials and the same trials alone."""

    def __init__(
        self, candidate: Candidate, unfused: dict[str, str], phases: Sequence[Phase], trials: Sequence[int]
    ) -> None:
        self.candidate = candidate
        self.unfused = unfused
        self.has_python_state = False
        self.phases = phases
        self._trials, self._first = trials, candidate.models[trials[0]]
        self._blamed: list[type] = []
        # The modules that the fused form calls, by name: in stages some of the plain model's are opened.
        self._called: dict[str, nn.Module] = {}
        # Of each phase, how far rounding took one of the trials.
        self._noise: dict[int, Noise] = {}
        self._mends = 0
        self._started, self._limit_s = time.perf_counter(), _SEARCH_S

    def verdict(self) -> Verdict:
        refused, failed = None, {}
        try:
            left = verify(self._find, self._mend, _ATTEMPTS + 2)
            refused = None if left is None else left.why
        except _FailsAlone as failure:
            refused = f"trial {failure.trial} fails by itself on these batches: {failure}"
            failed = {failure.trial: str(failure)}
        except NotRepeatableError:
            refused = _NOT_TWICE
        state, alone = self.has_python_state, self.candidate.loss_alone
        return Verdict(self.unfused, refused, 0.0, state, alone, failed)

    def _find(self) -> Mismatch | None:
        """The first trial that is not what it is alone, and the first phase in which it is not."""
        # Of the first trial before anything is fused: a model that fails alone is no one's else fault.
        first = self._trials[0]
        alone = list(_LoneTrial(self, first).run())
        if all(phase.training for phase in self.phases[:2]):
            self.has_python_state = changes_in_python(alone)
        try:
            fused = self._fuse()
        except FusionError as failure:
            return Mismatch(_first_line(failure), "", trial=first)
        steps: list[FusedStep] = []
        failed: Mismatch | None = None
        for phase in range(len(alone)):
            try:
                steps.append(self._together(fused, phase))
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # the user's code can fail in any way on fused tensors
                why, module = _first_line(failure), failed_in(failure, [one.module for one in fused])
                in_loss = module == IN_NONE and not self.candidate.loss_alone
                unlike = [Difference(_LOSS, torch.inf, 0.0, why)] if in_loss else []
                failed = Mismatch(why, module, phase, first, unlike)
                break
        del fused
        # Where a step failed, one trial is enough to see whether the steps before it were right.
        for place, trial in enumerate(self._trials[:1] if failed is not None else self._trials):
            reference = _LoneTrial(self, trial)
            expected = alone if place == 0 else list(reference.run(until=len(steps) - 1))
            own = (step.of_trial(place, reference.model) for step in steps)
            if (apart := first_differences(reference, expected, own, self._noise)) is not None:
                phase, wrong = apart
                mode = self.phases[phase].mode
                why = f"trial {trial} parts from the trial alone in {mode}: {wrong[0]}"
                return Mismatch(why, None, phase, trial, wrong)
            alone = []
        return failed

    def _mend(self, mismatch: Mismatch) -> bool:
        """Run another module trial by trial, or the loss; False where that has been done."""
        self._mends += 1
        if self._mends == 1:
            # It may be one of the trials that cannot take a step, and no module of all of them.
            for trial in self._trials[1:]:
                list(_LoneTrial(self, trial).run(until=0))
            self._limit_s = max(_SEARCH_S, _SEARCH_TIMES * self._searched_s)
        names = [difference.name for difference in mismatch.differences]
        only_loss = names[:1] == [_LOSS] and not _is_of_forward(mismatch)
        if only_loss and not self.candidate.loss_alone:
            self.candidate.loss_alone = True
            return True
        if "" in self.unfused or only_loss:
            return False
        is_late = self._mends > _ATTEMPTS or self._searched_s > self._limit_s
        blamed = mismatch.module if mismatch.module is not None else self._locate(mismatch)
        for name in [""] if is_late else self._to_unfuse(blamed):
            for inner in [one for one in self.unfused if one.startswith(f"{name}.") or not name]:
                del self.unfused[inner]
            self.unfused[name] = mismatch.why
        return True

    @property
    def _searched_s(self) -> float:
        return time.perf_counter() - self._started

    def _to_unfuse(self, blamed: str) -> list[str]:
        """The module to run trial by trial next: the one to blame, or what is around it."""
        parts = {"": self._first, **self._called}
        name = blamed
        while name and (is_within(name, self.unfused) or name not in parts):
            name = name.rpartition(".")[0]
        kind = type(parts[name])
        # Where a second one of a kind is to blame, all of that kind are.
        is_second = kind in self._blamed
        self._blamed.append(kind)
        if not name or not is_second:
            return [name]
        return [
            path
            for path, part in parts.items()
            if path and type(part) is kind and not is_within(path, self.unfused)
        ]

    def _fuse(self) -> Sequence[FusedModule]:
        fused, names = self.candidate.fuse(self._trials, self.unfused), first_names(self._first)
        for one in fused:
            for name, parameter in one.module.named_parameters():
                for place, trial in enumerate(self._trials):
                    _set_apart(parameter, parameter.data[place], names.get(name, name), trial)
        plain = dict(self._first.named_modules())
        self._called = {
            path: plain[path]
            for one in fused
            for path, part in one.module.named_modules()
            if path and path in plain and type(part) is not nn.Module and not isinstance(part, _CONTAINERS)
        }
        return fused

    def observable(self, alone: Observation) -> Observation:
        """What of a plain model can be seen of its fused form: not what an opened module keeps in Python."""
        if not self.candidate.in_stages:
            return alone
        kept = {f"{ATTRIBUTE}{path}" for path in self._called}
        return {
            name: value
            for name, value in alone.items()
            if not name.startswith(ATTRIBUTE) or name.rpartition(".")[0] in kept
        }

    def _together(
        self, fused: Sequence[FusedModule], number: int, trace: ModuleTrace | None = None
    ) -> FusedStep:
        """What the trials do in one phase, fused."""
        training, batch = self.phases[number]
        for one in fused:
            if not training or not one.module.training:
                one.train(training)
            for parameter in one.parameters():
                parameter.grad = None
        torch.clear_autocast_cache()
        with same_random_numbers(7), torch.set_grad_enabled(training), trace or nullcontext():
            outputs, losses = self.candidate.together(fused, self._trials, batch)
            if training and losses.requires_grad:
                losses.sum().backward()
        return FusedStep(fused, outputs, losses, training, first_names(self._first))

    def _locate(self, mismatch: Mismatch) -> str:
        """The first module whose outcome differs from that of the module alone."""
        place, phase = self._trials.index(mismatch.trial), mismatch.phase
        fused = self._fuse()
        together = ModuleTrace([one.module for one in fused], lambda leaf: _of_trial(leaf, place))
        try:
            for earlier in range(phase + 1):
                self._together(fused, earlier, together if earlier == phase else None)
            kinds = ("values", "gradients") if _is_of_forward(mismatch) else ("gradients",)
            located = locate(_LoneTrial(self, mismatch.trial), phase, together, kinds)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # some hook of the trace does what the model does not like: the whole is to blame
            return ""
        if located is None:
            return ""
        kind, keys = located
        # Of gradients that differ, the first was made around the last of those modules that ran.
        return path_of(keys[0]) if kind == "values" else path_of(keys[-1]).rpartition(".")[0]


class _LoneTrial(Reference):
    """One trial alone: its plain model, with the random numbers that it draws among the others."""

    def __init__(self, check: _Check, trial: int) -> None:
        candidate = check.candidate
        model, seed = candidate.models[trial], 1000 * (trial + 1)
        super().__init__(model, check.phases, seed=seed, rounding=candidate.rounding)
        self._check, self._trial = check, trial

    def begin(self) -> None:
        candidate, trial = self._check.candidate, self._trial
        candidate.prepare(trial)
        for name, parameter in self.model.named_parameters():
            _set_apart(parameter, parameter.data, name, trial)
        self._lone = LoneRun(self.model, candidate.seeds[trial], candidate.ages[trial], self._check.unfused)

    def forward(self, phase: Phase) -> tuple[Any, Tensor]:
        # In training, modules kept in evaluation mode on purpose stay in it.
        if phase.training != self.model.training:
            self.model.train(phase.training)
        with self._lone.forward():
            return self._check.candidate.alone(self._trial, phase.batch)

    def visible(self, observed: Observation) -> Observation:
        return self._check.observable(observed)

    def run(
        self, seed: int | None = None, until: int | None = None, trace: ModuleTrace | None = None
    ) -> Iterator[Observation]:
        """What the trial does in each phase, with numbers in Python; it ends where it cannot be evaluated."""
        done = 0
        try:
            for step in super().run(seed, until, trace):
                done += 1
                yield {**step, **numbers_in(self.model)}
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # the user's code can fail in any way
            if not self.phases[done].training:
                return  # its forward asks for gradients, say
            if isinstance(failure, PlaitError):
                raise
            raise _FailsAlone(self._trial, _first_line(failure)) from failure


def _is_of_forward(mismatch: Mismatch) -> bool:
    """Whether outputs differ, or what forward leaves."""
    return any(d.name.startswith(("output", BUFFER, ATTRIBUTE)) for d in mismatch.differences)


def _set_apart(parameter: Tensor, values: Tensor, name: str, trial: int) -> None:
    """Move one trial's values of a trained parameter a little, by what its name and the trial draw.

    Trials that begin alike would hide that one computes with what belongs to another.
    """
    if not trial or not parameter.requires_grad or not parameter.is_floating_point():
        return
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {trial}".encode()))
    with torch.no_grad():
        few = torch.randn(min(_DRAWN, values.numel()), generator=generator).to(values)
        times = -(-values.numel() // max(1, len(few)))
        drawn = few.repeat(times)[: values.numel()].view(values.shape)
        values.add_(drawn * values.abs().mean().clamp(min=1e-3), alpha=APART)


def _of_trial(leaf: Tensor, place: int) -> tuple[Tensor, Any]:
    """A tensor as that of all trials, and what takes one trial's of it."""
    if isinstance(leaf, TrialTensor):
        return leaf.stacked, lambda stacked: stacked[place]
    return leaf, lambda own: own


def _first_line(failure: BaseException) -> str:
    """What was found, in one line: without the advice of fusion's errors, to do what is done here."""
    text = failure.what if isinstance(failure, FusionError) else str(failure)
    text = text.strip() or type(failure).__name__
    line = " ".join(part.strip() for part in text.splitlines()[:2])
    line = line if isinstance(failure, PlaitError) else f"{type(failure).__name__}: {line}"
    return line if len(line) <= 300 else f"{line[:297]}..."
