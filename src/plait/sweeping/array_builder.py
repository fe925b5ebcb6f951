"""Builds the arrays of a sweep: chooses their width, and makes the engines that train them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from torch import Tensor

from plait.core.codec import encode
from plait.core.errors import JobError
from plait.data.loader import BatchStream
from plait.data.requirements import check_unchanged, streams_of
from plait.fusion.verify import FusionReport
from plait.measure.fresh_process import FreshProcesses
from plait.schema.settings import TrainSettings
from plait.sweeping.array_size import ArrayRequest, FailsAloneError, choose_width
from plait.sweeping.array_workers import ArrayWorkers
from plait.sweeping.engines.array_plans import holders_of_stages, layout_from
from plait.sweeping.engines.array_verifier import ArrayVerifier
from plait.sweeping.engines.trial_audits import TrialAudits
from plait.sweeping.fusable import (
    NotFusedError,
    fused_work,
    why_failed,
    why_optimizer,
)
from plait.training.batch_streams import sample_order
from plait.training.checks.replicas import check_no_rows
from plait.training.components import TrialInit
from plait.training.components import build as build_components
from plait.training.engines.averaging_member import (
    MakeMember,
    MemberInit,
    MemberState,
    WholeModelMember,
    WholeModelState,
)
from plait.training.engines.decentralized import DecentralizedEngine
from plait.training.engines.train_step import AnyComponents
from plait.training.engines.whole_model import WholeModelEngine
from plait.training.fused.fused_components import FusedComponents
from plait.training.monitoring.required_signals import wants_norms
from plait.training.monitoring.share_monitor import ShareMonitor
from plait.training.setup.data import DataPair
from plait.training.trial import Trial

if TYPE_CHECKING:
    from plait.pipeline.executor import PipelineExecutor
    from plait.training.engines.pipeline import OnStageStep, PipelineEngine
    from plait.training.monitoring.stage_monitor import StageMonitor

# What trains an array.
ArrayTrainer = Union["WholeModelEngine", "DecentralizedEngine", "PipelineEngine"]
# Called after each step: how many of the interval are done, and the trials' losses.
OnLosses = Callable[[int, Tensor], None]


class ArrayBuilder:
    """Builds the arrays of this worker's group, whose workers all call each method together.

    A *group of trials* can be fused with each other. What is known of a group (its width, which modules run
    trial by trial, how its stages are cut) is used for all later arrays of it.
    """

    def __init__(self, workers: ArrayWorkers, fresh: FreshProcesses | None) -> None:
        self.workers = workers
        # Measures widths in a separate process, on the first worker of the group.
        self._fresh = fresh
        # The width of the arrays of a group, and the reason if it is 1.
        self._widths: dict[str, tuple[int, str]] = {}
        self.verifier = ArrayVerifier(workers)
        # How many engines were opened, to name what they keep in the job's store.
        self._openings = 0

    def width(self, group: str) -> int:
        return self._widths[group][0]

    def why_one_by_one(self, group: str) -> str:
        """Why the group's trials train one by one; empty if they are fused."""
        return self._widths[group][1]

    def train_one_by_one(self, group: str, why: str) -> None:
        self._widths[group] = 1, why

    def narrow(self, group: str, trials: int, why: str) -> None:
        """Halve the width of a group after `trials` trials did not fit into memory."""
        width = min(self.width(group), trials) // 2
        self._widths[group] = (width, "") if width > 1 else (1, why)

    def choose_width(self, group: str, settings: TrainSettings, sets: DataPair, share: int) -> None:
        """Choose the width of a group's arrays, at most this worker's `share` of the waiting trials."""
        if group not in self._widths:
            self._widths[group] = self._find_width(group, settings, sets, share)

    def forget_width(self, group: str) -> None:
        """Let the next `choose_width` of a group measure again, with another trial."""
        self._widths.pop(group, None)

    def forget_widths(self, kept: str) -> None:
        """Forget all widths above 1 except that of the group `kept`: the number of workers has changed."""
        self._widths = {name: width for name, width in self._widths.items() if width[1] or name == kept}

    def _find_width(
        self, group: str, settings: TrainSettings, sets: DataPair, trials: int
    ) -> tuple[int, str]:
        if (why := why_optimizer(settings)) is not None:
            return 1, why
        if self.workers.settings.width == 1:
            return 1, "--width is 1"
        try:
            return self._try_width(settings, sets, trials, None)
        except NotFusedError as failure:
            if self.workers.settings.train.verify.start == "off":
                return 1, str(failure)
        # Some module may have to run trial by trial.
        entries = [
            TrialInit(settings, build_components(settings, self.workers.device, sets)) for _ in range(2)
        ]
        try:
            return self._try_width(settings, sets, trials, self.verifier.verify(group, entries, ()))
        except NotFusedError as failure:
            return 1, str(failure)

    def _try_width(
        self, settings: TrainSettings, sets: DataPair, trials: int, verdict: FusionReport | None
    ) -> tuple[int, str]:
        def measure() -> tuple[int, str]:
            width, replicas = self.workers.settings.width, self.workers.settings.replicas
            if self._fresh is None:
                assert width is not None
                return width, ""
            # A given width is tried before the array is built: a failure during it would leave the group
            # stuck.
            request = ArrayRequest(
                settings, str(self.workers.device), replicas, verdict, trials if width is None else None
            )
            chosen, why = choose_width(self._fresh, request, sets)
            return (chosen, why) if width is None else (width, "")

        width, why, failed = self.workers.group.from_first(lambda: _outcome(measure))
        if failed:
            raise NotFusedError(why) if width else FailsAloneError(why)
        return width, why

    def fused_work(self, group: str) -> AbstractContextManager[None]:
        """Around work of an array: turns failures of fused trials into NotFusedError.

        Not with several workers, since the others are in the middle of the same call.
        """
        can_separate = self.workers.group.is_alone and self.width(group) > 1
        return fused_work() if can_separate else nullcontext()

    def make(
        self,
        group: str,
        entries: Sequence[TrialInit],
        trials: list[Trial],
        feed: Callable[[Trial], BatchStream],
        on_losses: OnLosses,
        audit: TrialAudits,
    ) -> ArrayTrainer:
        """An engine for a verified array of these trials; NotFusedError if they must train one by one."""
        worker, workers, numbers = self.workers.worker, self.workers.group, [trial.number for trial in trials]

        def on_step(done: int, losses: Tensor, *_: Any) -> None:
            on_losses(done, losses)

        first = entries[0]
        check_unchanged(first.settings, first.components.train_set.dataset, elastic=False)
        engine: ArrayTrainer
        if self.workers.is_pipelined:
            engine = self._in_stages(group, entries, trials, feed, on_step, audit)
        elif self.workers.averages:
            state = WholeModelState(
                self._make_components(group, entries, numbers), [dict(entry.sync) for entry in entries]
            )
            engine = self._decentralized(
                trials,
                state,
                lambda init: WholeModelMember(worker, init, state, audit, self._share_monitor(init, state)),
            )
        else:
            components = self._make_components(group, entries, numbers)
            engine = WholeModelEngine(worker, trials, components, feed, on_step, audit=audit, group=workers)
        engine.open()
        if not workers.is_alone:
            chosen, worker.rendezvous.unrecorded = worker.rendezvous.unrecorded, []
            for each in chosen:
                worker.ask({"ask": "topology", "chosen": encode(each)})
        return engine

    def _in_stages(
        self,
        group: str,
        entries: Sequence[TrialInit],
        trials: list[Trial],
        feed: Callable[[Trial], BatchStream],
        on_step: OnStageStep,
        audit: TrialAudits,
    ) -> ArrayTrainer:
        # Imported here, since they are slow.
        from plait.sweeping.engines.array_stages import ArrayStages, FusedStages
        from plait.training.engines.pipeline import PipelineEngine, not_audited
        from plait.training.engines.pipeline_member import PipelineMember

        worker, workers = self.workers.worker, self.workers.group
        check_replicated(entries[0], max(holders_of_stages(self.workers.settings)) > 1)
        microbatches = layout_from(0, self.workers.settings).microbatches
        self._warn_of_whole_batches(entries[0], microbatches, "parallel.microbatches")
        self._check_averaged(entries[0])
        is_fused, numbers = self.width(group) > 1, [trial.number for trial in trials]
        verified, verdict = self.verifier.verify_in_stages(group, entries, numbers, is_fused)
        if not is_fused:
            stages, begin_audit = ArrayStages(worker, entries, feed, workers, verified), not_audited
        else:
            stages = fused = FusedStages(worker, entries, feed, workers, verified, verdict)
            begin_audit = partial(audit.begin_in_stages, fused)
        if not self.workers.averages:
            engine = PipelineEngine(
                worker,
                trials,
                stages,
                on_step,
                begin_audit=begin_audit,
                make_monitor=lambda pipeline: self._monitor(engine, pipeline),
                group=workers,
            )
            return engine
        if self.workers.settings.train.verify.audit != "off":
            self.workers.warn_once("audit: the steps of pipelines side by side are not audited")

        def make_member(init: MemberInit) -> PipelineMember:
            monitor = self._share_monitor(init, stages)
            return PipelineMember(worker, init, stages, stages.open(), monitor=monitor)

        return self._decentralized(trials, stages, make_member)

    def _monitor(self, engine: PipelineEngine, pipeline: PipelineExecutor) -> StageMonitor | None:
        """What measures the gradient noise of an array in stages, if the job needs it."""
        from plait.training.monitoring.stage_monitor import StageMonitor  # slow to import

        if (norms := engine.components.norms) is None:
            return None
        place = self.workers.group.place, self.workers.group.size
        return StageMonitor(place, engine.trials, pipeline, norms.averages, self.workers.warn_once)

    def _share_monitor(self, init: MemberInit, state: MemberState) -> ShareMonitor | None:
        """What measures the gradient noise of an array whose members average, if the job needs it."""
        return None if state.components.norms is None else ShareMonitor(init.trials, self.workers.warn_once)

    def _decentralized(
        self, trials: list[Trial], state: MemberState, make_member: MakeMember
    ) -> DecentralizedEngine:
        def next_name() -> str:
            self._openings += 1
            # In an elastic sweep each group has its own ranks; no number of a group is used twice.
            number = self.workers.worker.memberships.current.group
            group = f"rank{self.workers.group.first_rank}" if number is None else f"group{number}"
            return f"array.{group}.{self._openings}"

        return DecentralizedEngine(
            self.workers.worker,
            trials,
            state,
            make_member,
            next_name,
            lambda trial, source: sample_order(source, trial),
            group=self.workers.group,
        )

    def _make_components(
        self, group: str, entries: Sequence[TrialInit], numbers: Sequence[int]
    ) -> AnyComponents:
        workers = self.workers.group
        check_replicated(entries[0], not workers.is_alone)
        self._check_averaged(entries[0])
        self._warn_of_whole_batches(entries[0], entries[0].settings.accumulate, "accumulate")
        if self.width(group) == 1:
            return entries[0].components
        verdict = self.verifier.verify(group, entries, numbers)
        with self.fused_work(group):
            return FusedComponents(entries, workers.place, verdict, is_shared=not workers.is_alone)

    def _warn_of_whole_batches(self, first: TrialInit, microbatches: int, key: str) -> None:
        if wants_norms(first.settings) and microbatches == 1 and not self.workers.averages:
            self.workers.warn_once(
                "monitor: trials that take each batch as a whole have no part of it to compare with, so "
                f"there is no noise scale and no variance; use {key}: 2 or more"
            )

    def _check_averaged(self, first: TrialInit) -> None:
        """Refuse state that workers which average do not share; warn if they average more than in a run."""
        if not self.workers.averages:
            return
        check_no_rows(first.components, first.settings)
        logs, due = first.settings.log_every_steps, Trial(first.settings).periods
        if logs and not any(every and logs % every == 0 for every in due):
            self.workers.warn_once(
                "log_every_steps: the workers of an array synchronize at each point of a curve, every "
                f"{logs} steps, which those of a run do not; leave it out for the numbers of a run"
            )


def check_replicated(entry: TrialInit, is_replicated: bool) -> None:
    """Refuse data whose samples continue those of the batch before: replicas would see only shares of it."""
    if is_replicated and streams_of(entry.components.train_set.dataset) is not None:
        raise JobError(
            f"--replicas: the samples of {entry.settings.data.kind} continue those of the batch before, "
            f"whose state replicas of an array do not share; sweep without --replicas and replicated stages"
        )


def _outcome(measure: Callable[[], tuple[int, str]]) -> tuple[int, str, bool]:
    """(width, reason if it is 1, False); on failure (1 if only fused trials fail, else 0, reason, True)."""
    try:
        return *measure(), False
    except NotFusedError as failure:
        return 1, str(failure), True
    except Exception as failure:  # a user's model can fail in any way
        if (why := why_failed(failure)) is None:
            raise
        return 0, why, True
