"""Verifies that fused trials compute what single ones do, once for all arrays of a group of trials."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from plait.core.codec import decode, encode
from plait.fusion.verify import FusionReport, log_report
from plait.schema.settings import TrainSettings
from plait.sweeping.array_workers import ArrayWorkers
from plait.sweeping.engines.array_plans import layout_from
from plait.sweeping.engines.verified_arrays import verify_entries
from plait.sweeping.fusable import NotFusedError, TrialsFailedError
from plait.training.components import TrialInit
from plait.training.components import build as build_components

if TYPE_CHECKING:
    from plait.sweeping.engines.verified_stages import StagesOfTrials

log = logging.getLogger(__name__)


class ArrayVerifier:
    """What is known of the verified trials of this worker's group, whose workers call each method together.

    The first worker of the group verifies; all of them have its report.
    """

    def __init__(self, workers: ArrayWorkers) -> None:
        self._workers = workers
        # By group of trials: the report, and the verified layers of each stage.
        self._verdicts: dict[str, FusionReport] = {}
        self._stages: dict[str, tuple[tuple[str, ...], ...]] = {}
        # The numbers of verified trials.
        self._verified: set[int] = set()

    def has_python_state(self, group: str) -> bool:
        """Whether verification found Python state in the group's models, which checkpoints do not hold."""
        return group in self._verdicts and self._verdicts[group].has_python_state

    def verify_joining(
        self, group: str, first: TrainSettings, entries: Sequence[TrialInit], numbers: Sequence[int]
    ) -> None:
        """Verify trials that are to join an array whose first trial has the settings `first`.

        NotFusedError if they compute something else when fused with it. The check uses a new model of the
        first trial, since the array is training.
        """
        if not self._is_verification_due(self._verdicts.get(group), numbers):
            return
        both = [self._new_entry(first, entries[0]), *entries]
        known = self._verdicts.get(group, FusionReport())
        if self._workers.settings.train.in_stages:
            _, verdict = self.verify_in_stages(group, both, numbers, is_fused=True)
        else:
            verdict = self.verify(group, both, numbers)
        if new := [name for name in verdict.unfused if name not in known.unfused]:
            self._verdicts[group] = known
            raise NotFusedError(f"with them {new[0] or 'the model'} {verdict.unfused[new[0]]}")

    def first_model(self, first: TrainSettings, like: TrialInit) -> nn.Module:
        """A new model of a trial with the settings `first`, whose data are those of `like`."""
        return self._new_entry(first, like).components.model

    def _new_entry(self, settings: TrainSettings, like: TrialInit) -> TrialInit:
        sets = (like.components.train_set, like.components.test_set)
        return TrialInit(settings, build_components(settings, self._workers.device, sets))

    def verify(self, group: str, entries: Sequence[TrialInit], numbers: Sequence[int]) -> FusionReport:
        """The verification report of these trials: that of the group if all are verified.

        NotFusedError if they cannot be fused.
        """
        known = self._verdicts.get(group)
        if not self._is_verification_due(known, numbers):
            return known or FusionReport()
        verdict = self._verify_on_first(lambda: verify_entries(entries, self._workers.group.share, known))
        self._keep(group, verdict, known, numbers, len(entries))
        return verdict

    def verify_in_stages(
        self, group: str, entries: Sequence[TrialInit], numbers: Sequence[int], is_fused: bool
    ) -> tuple[StagesOfTrials, FusionReport]:
        """The stages of these trials, and the report of their verification; see `verify`.

        NotFusedError if they cannot be fused, JobError if stages cannot train a single one.
        """
        from plait.sweeping.engines.verified_stages import prepare_trials, verify_stages

        known, layout = (
            self._verdicts.get(group),
            layout_from(self._workers.group.first_rank, self._workers.settings),
        )
        is_due = self._is_verification_due(known, numbers)
        averaged = self._workers.averages
        planned = replace(layout, stages=self._stages.get(group, layout.stages))
        if self._workers.group.is_first:
            stages = prepare_trials(entries, planned, is_due, averaged)
        layers = self._workers.group.from_first(lambda: stages.checked.fine)
        if not self._workers.group.is_first:
            planned = replace(layout, stages=tuple(tuple(each) for each in layers))
            stages = prepare_trials(entries, planned, False, averaged)
        for warning in stages.checked.notes:
            log.warning("verify: %s", warning)
        if not is_fused or not is_due:
            return stages, known or FusionReport()
        verdict = self._verify_on_first(lambda: verify_stages(entries, stages, known))
        self._stages[group] = stages.checked.fine
        timed = replace(verdict, seconds=verdict.seconds + stages.checked.seconds)
        self._keep(group, timed, known, numbers, len(entries))
        return stages, verdict

    def _is_verification_due(self, known: FusionReport | None, numbers: Sequence[int]) -> bool:
        """Whether the trials `numbers` must be verified: each once, or every time it joins (`every_run`)."""
        mode = self._workers.settings.train.verify.start
        is_new = known is None or not self._verified.issuperset(numbers)
        return mode != "off" and (is_new or mode == "every_run")

    def _verify_on_first(self, verify: Callable[[], FusionReport]) -> FusionReport:
        """Verify on the first worker of the group; returns the report on all of its workers."""
        if self._workers.group.is_alone:
            return verify()
        verdict: FusionReport = decode(
            FusionReport, self._workers.group.from_first(lambda: encode(verify())), "verdict"
        )
        return verdict

    def _keep(
        self,
        group: str,
        verdict: FusionReport,
        known: FusionReport | None,
        numbers: Sequence[int],
        trials: int,
    ) -> None:
        """Report a verdict and keep it for later arrays; NotFusedError if it is a refusal."""
        if self._workers.group.is_first:
            log_report(verdict, known.unfused if known is not None else {})
            if verdict.refused is None:
                log.info("verified %d fused trials in %.1f s", trials, verdict.seconds)
        self._workers.ask(
            ask="verified",
            worker=self._workers.worker.id,
            trials=trials,
            seconds=verdict.seconds,
            unfused=dict(verdict.unfused),
            refused=verdict.refused,
        )
        # The first entry may be a new model of a present trial.
        others = trials - len(numbers)
        if failed := {numbers[n - others]: why for n, why in verdict.failed.items() if n >= others}:
            raise TrialsFailedError(failed)
        if verdict.refused is not None:
            raise NotFusedError(verdict.refused)
        self._verdicts[group] = verdict
        self._verified.update(numbers)
