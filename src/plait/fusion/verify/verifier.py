"""Verifies that fused trials compute the same as their plain models, and locates modules that differ.

The trials run on real batches, fused and singly, with the same random numbers. Outputs, losses, the gradient
of every parameter, buffers and numbers that modules keep in Python must agree up to rounding, in training and
in evaluation mode. If they do not, the first module at which they differ is run trial by trial, and all is
compared again. The fused trials are a separate array; the plain models themselves are run, and restored
afterwards.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.stacking import is_within
from plait.fusion.verify.candidates import Candidate
from plait.fusion.verify.fused_step import ATTRIBUTE, FusedStep, changes_in_python
from plait.fusion.verify.plain_trial import PlainModelFailed, PlainTrial, first_line, perturb_trial
from plait.verification import BUFFER, Difference, Noise, Observation, first_names, same_random_numbers
from plait.verification.module_trace import IN_NONE, ModuleTrace, failed_in, path_of
from plait.verification.verify import Mismatch, NotRepeatableError, Phase, first_differences, locate, verify

log = logging.getLogger(__name__)

# Each mode twice, to see state that a model keeps.
PHASES = (Phase(True, 0), Phase(True, 1), Phase(False, 0), Phase(False, 1))
# For trials whose structure was verified before.
FEW_PHASES = (Phase(True, 0), Phase(False, 0))
# How many modules are unfused one by one before the whole model is.
_ATTEMPTS = 12
# After this time, and a multiple of the first comparison, the whole model is unfused instead of modules.
_SEARCH_S, _SEARCH_TIMES = 20.0, 6.0
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_WHOLE = "the whole model"
_LOSS = "the loss"
_NOT_REPEATABLE = (
    "a single model gives another result when it is run again from the same state with the same random "
    "numbers: its forward depends on something outside of the model (a global variable, a file, the time)"
)


@dataclass(frozen=True)
class FusionReport:
    """The result of verification: the modules that must run trial by trial, by name, with the reasons.

    `refused` is why not even that is enough; then each trial must be trained separately. `has_python_state`:
    modules keep numbers in Python that change between steps, which a CUDA graph cannot contain. With
    `loss_alone` only the loss is computed trial by trial. `failed` are the indices of trials whose plain
    model raises an error, with the error.
    """

    unfused: Mapping[str, str] = field(default_factory=dict)
    refused: str | None = None
    seconds: float = 0.0
    has_python_state: bool = False
    loss_alone: bool = False
    failed: Mapping[int, str] = field(default_factory=dict)


def verify_fused(
    candidate: Candidate, unfused: Mapping[str, str] | None = None, phases: Sequence[Phase] = PHASES
) -> FusionReport:
    """Compare all trials, fused, with their plain models.

    If there is not enough memory for a second array of all trials, they are compared in smaller arrays.
    """
    start = time.perf_counter()
    report = _verify(candidate, dict(unfused or {}), phases, list(range(len(candidate.models))))
    return replace(report, seconds=time.perf_counter() - start)


def _verify(
    candidate: Candidate, unfused: dict[str, str], phases: Sequence[Phase], trials: list[int]
) -> FusionReport:
    check = _Verifier(candidate, unfused, phases, trials)
    try:
        return check.report()
    except torch.OutOfMemoryError:
        pass  # the traceback holds memory: continue outside of the handler
    del check
    gc.collect()
    torch.cuda.empty_cache()
    if len(trials) == 1:
        log.warning(
            "fused trials were not verified: there is not enough memory for a second copy of one of them"
        )
        return FusionReport(unfused)
    half = len(trials) // 2
    first = _verify(candidate, unfused, phases, trials[:half])
    if first.refused is not None:
        return first
    return _verify(candidate, dict(first.unfused), phases, trials[half:])


def log_report(report: FusionReport, known: Mapping[str, str]) -> None:
    """Log which modules run trial by trial, besides those `known` before, or why nothing is fused."""
    if report.refused is not None:
        log.warning("these trials are not fused, each trains separately: %s", report.refused)
        return
    for name, why in report.unfused.items():
        if name not in known:
            log.warning("%s runs trial by trial, which is slower: %s", name or _WHOLE, why)


class _Verifier:
    """Compares one array of trials with their plain models."""

    def __init__(
        self, candidate: Candidate, unfused: dict[str, str], phases: Sequence[Phase], trials: Sequence[int]
    ) -> None:
        self.candidate = candidate
        self.unfused = unfused
        self.has_python_state = False
        self.phases = phases
        self._trials, self._first = trials, candidate.models[trials[0]]
        self._blamed: list[type] = []
        # The modules that the fused form calls, by name; stages call only some of the plain model's.
        self._called: dict[str, nn.Module] = {}
        # The rounding error of one of the trials in each phase.
        self._noise: dict[int, Noise] = {}
        self._mends = 0
        self._started, self._limit_s = time.perf_counter(), _SEARCH_S

    def report(self) -> FusionReport:
        refused, failed = None, {}
        try:
            left = verify(self._find, self._mend, _ATTEMPTS + 2)
            refused = None if left is None else left.why
        except PlainModelFailed as failure:
            refused = f"the plain model of trial {failure.trial} fails on these batches: {failure}"
            failed = {failure.trial: str(failure)}
        except NotRepeatableError:
            refused = _NOT_REPEATABLE
        state, alone = self.has_python_state, self.candidate.loss_alone
        return FusionReport(self.unfused, refused, 0.0, state, alone, failed)

    def _find(self) -> Mismatch | None:
        """The first trial, and its first phase, that differs from its plain model."""
        # Run the first plain model before fusing, to see whether it raises by itself.
        first = self._trials[0]
        alone = list(self._plain(first).run())
        if all(phase.training for phase in self.phases[:2]):
            self.has_python_state = changes_in_python(alone)
        try:
            fused = self._fuse()
        except FusionError as failure:
            return Mismatch(first_line(failure), "", trial=first)
        steps: list[FusedStep] = []
        failed: Mismatch | None = None
        for phase in range(len(alone)):
            try:
                steps.append(self._together(fused, phase))
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # the user's code can raise anything on fused tensors
                why, module = first_line(failure), failed_in(failure, [fused.module])
                in_loss = module == IN_NONE and not self.candidate.loss_alone
                unlike = [Difference(_LOSS, why)] if in_loss else []
                failed = Mismatch(why, module, phase, first, unlike)
                break
        del fused
        # If a step failed, compare one trial to see whether the steps before it were correct.
        for index, trial in enumerate(self._trials[:1] if failed is not None else self._trials):
            reference = self._plain(trial)
            expected = alone if index == 0 else list(reference.run(until=len(steps) - 1))
            steps_of_trial = (step.of_trial(index, reference.model) for step in steps)
            if (apart := first_differences(reference, expected, steps_of_trial, self._noise)) is not None:
                phase, wrong = apart
                mode = self.phases[phase].mode
                why = f"trial {trial} differs from its plain model in {mode}: {wrong[0]}"
                return Mismatch(why, None, phase, trial, wrong)
            alone = []
        return failed

    def _mend(self, mismatch: Mismatch) -> bool:
        """Run another module, or the loss, trial by trial; returns False if nothing is left to do."""
        self._mends += 1
        if self._mends == 1:
            # A single trial may be at fault: check that every plain model can take a step.
            for trial in self._trials[1:]:
                list(self._plain(trial).run(until=0))
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
            for inner in [one for one in self.unfused if is_within(one, [name])]:
                del self.unfused[inner]
            self.unfused[name] = mismatch.why
        return True

    @property
    def _searched_s(self) -> float:
        return time.perf_counter() - self._started

    def _to_unfuse(self, blamed: str) -> list[str]:
        """The modules to unfuse next: the one at fault, or its parent."""
        parts = {"": self._first, **self._called}
        name = blamed
        while name and (is_within(name, self.unfused) or name not in parts):
            name = name.rpartition(".")[0]
        kind = type(parts[name])
        # If a second module of the same class is at fault, unfuse all of that class.
        is_second = kind in self._blamed
        self._blamed.append(kind)
        if not name or not is_second:
            return [name]
        return [
            path
            for path, part in parts.items()
            if path and type(part) is kind and not is_within(path, self.unfused)
        ]

    def _fuse(self) -> FusedModule:
        fused, names = self.candidate.fuse(self._trials, self.unfused), first_names(self._first)
        shared = fused.shared_ids()
        for name, parameter in fused.module.named_parameters():
            for index, trial in enumerate(() if id(parameter) in shared else self._trials):
                perturb_trial(parameter, parameter.data[index], names.get(name, name), trial)
        plain = dict(self._first.named_modules())
        self._called = {
            path: plain[path]
            for path, part in fused.module.named_modules()
            if path and path in plain and type(part) is not nn.Module and not isinstance(part, _CONTAINERS)
        }
        return fused

    def _plain(self, trial: int) -> PlainTrial:
        return PlainTrial(self.candidate, trial, self.phases, self.unfused, self._observable)

    def _observable(self, alone: Observation) -> Observation:
        """The observations that exist for the fused form, which may not call all modules."""
        if not self.candidate.in_stages:
            return alone
        kept = {f"{ATTRIBUTE}{path}" for path in self._called}
        return {
            name: value
            for name, value in alone.items()
            if not name.startswith(ATTRIBUTE) or name.rpartition(".")[0] in kept
        }

    def _together(self, fused: FusedModule, number: int, trace: ModuleTrace | None = None) -> FusedStep:
        """Run the fused trials in one phase."""
        training, batch = self.phases[number]
        if not training or not fused.module.training:
            fused.train(training)
        for parameter in fused.parameters():
            parameter.grad = None
        torch.clear_autocast_cache()
        with same_random_numbers(7), torch.set_grad_enabled(training), trace or nullcontext():
            outputs, losses = self.candidate.together(fused, self._trials, batch)
            if training and losses.requires_grad:
                losses.sum().backward()
        return FusedStep(fused, outputs, losses, training, first_names(self._first))

    def _locate(self, mismatch: Mismatch) -> str:
        """The first module whose output differs from the plain model's."""
        index, phase = self._trials.index(mismatch.trial), mismatch.phase
        fused = self._fuse()
        together = ModuleTrace([fused.module], lambda leaf: _of_trial(leaf, index))
        try:
            for earlier in range(phase + 1):
                self._together(fused, earlier, together if earlier == phase else None)
            kinds = ("values", "gradients") if _is_of_forward(mismatch) else ("gradients",)
            located = locate(self._plain(mismatch.trial), phase, together, kinds)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # tracing hooks may break the model: unfuse all of it
            return ""
        if located is None:
            return ""
        kind, keys = located
        # The first gradient that differs in backward belongs to the last module in forward order.
        return path_of(keys[0]) if kind == "values" else path_of(keys[-1]).rpartition(".")[0]


def _is_of_forward(mismatch: Mismatch) -> bool:
    """Whether outputs, buffers or attributes differ, not only gradients or the loss."""
    return any(d.name.startswith(("output", BUFFER, ATTRIBUTE)) for d in mismatch.differences)


def _of_trial(leaf: Tensor, index: int) -> tuple[Tensor, Any]:
    """The tensor of all trials, and a function that selects one trial's."""
    if isinstance(leaf, TrialTensor):
        return leaf.stacked, lambda stacked: stacked[index]
    return leaf, lambda tensor: tensor
