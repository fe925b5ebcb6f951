"""The loop of a sweep on one group of workers: take trials from the coordinator, train and report them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from plait.adapt.changes import BatchSizeChange, ChangeRequest
from plait.adapt.members import loss_of
from plait.core.codec import encode, finite_numbers
from plait.core.errors import JobError, PeerError
from plait.data.loader import BatchStream
from plait.launcher.run_dir import RunDir
from plait.measure.fresh_process import FreshProcesses
from plait.schema.settings import TrainSettings
from plait.sweeping.array_builder import ArrayBuilder
from plait.sweeping.array_engine import ArrayEngine, JoiningTrial, TrialsChange
from plait.sweeping.array_workers import ArrayWorkers
from plait.sweeping.elastic.members import SweepMembers
from plait.sweeping.fusable import NotFusedError, TooWideError, TrialsFailedError, short, why_failed
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.assigned_trials import AssignedTrials
from plait.sweeping.trials.running_trial import RunningTrial
from plait.training.batch_streams import find_stream, open_stream
from plait.training.change.apply import find_requests, is_due
from plait.training.checks.first_evaluation import try_evaluation
from plait.training.components import build as build_components
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.loop import Loop
from plait.training.setup.data import DataPair
from plait.training.trial import Due, Trial

# Seconds between two requests of a worker that has room for more trials.
POLL_S = 0.1
# Seconds between two questions whether idle workers need some of its trials.
OFFER_S = 0.5
log = logging.getLogger(__name__)


class SweepLoop(Loop):
    """Trains trials on this worker's group; all workers of the group run it in lockstep.

    It ends when the group does. Between two steps, trials that have ended leave the array and others join, as
    the coordinator decides.
    """

    def __init__(
        self,
        workers: ArrayWorkers,
        folder: RunDir,
        members: SweepMembers,
        fresh: FreshProcesses | None = None,
    ) -> None:
        self._workers = workers
        self._builder = ArrayBuilder(workers, fresh)
        self._assigned = AssignedTrials(workers, folder)
        self.engine: ArrayEngine = ArrayEngine(self._builder, self._stream_of)
        self._leaving: list[int] = []
        self._asked = 0.0
        self._is_over = False
        # Whether the first test batches were evaluated, which shows errors in the evaluation early.
        self._has_tried = False
        # The group whose width could not be chosen, because the trial that now trains alone failed.
        self._tried: str | None = None
        self._members = members
        # When this worker last offered the others trials of its array, and whether the group does now.
        self._offered = 0.0
        self._offers = False
        self._step_s = 0.0

    @property
    def trials(self) -> list[RunningTrial]:
        return self.engine.trials

    def run(self) -> str:
        """Train until the end: `finished`, or `stopped` or `left` with the state of every trial saved.

        It is also `left` by the loss of a worker of the group: the trials go on from their last checkpoints.
        """
        while True:
            try:
                reason = self.take_steps()
                if reason != "finished":
                    self._save_and_return_all()
                if reason == "left":
                    self._members.leave_group()
                return reason
            except NotFusedError as failure:
                self._separate(failure)
            except TrialsFailedError as failure:
                self._fail(failure)
            except RuntimeError as failure:
                loss = None if self._workers.group.is_alone else loss_of(self._workers.worker, failure)
                if loss is None:
                    raise
                break
        # Outside the except clause: its traceback keeps the broken process group alive.
        self._abandon(loss)
        return "left"

    def _abandon(self, loss: PeerError) -> None:
        """Leave the group, which has lost a worker; its first worker returns the trials."""
        with contextlib.suppress(RuntimeError):
            self.engine.close()
        if self._workers.group.is_first:
            # The group may not know of all trials that it was assigned.
            self._workers.worker.ask({"ask": "abandon", "worker": self._workers.worker.id})
        self._members.leave_group(loss)

    def ended(self) -> str | None:
        change, stop, self._offers, self._step_s = self._workers.group.from_first(self._find_requests)
        if change is not None:
            version, stays = change
            if not stays:
                return "left"
            self._members.stay(version)
            self._builder.forget_widths(self.engine.group)
        if stop:
            return "stopped"
        return "finished" if self._is_over else None

    def _find_requests(self) -> tuple[tuple[int, bool] | None, bool, bool, float]:
        """A change of members, a request to stop, whether to offer trials, and the seconds of a step."""
        offers = self._members.can_change and time.monotonic() - self._offered >= OFFER_S
        return self._members.find_change(), self._workers.worker.stop_requested(), offers, self._step_s

    def _is_stop_requested(self) -> bool:
        return bool(self._workers.group.from_first(self._workers.worker.stop_requested))

    def apply_changes(self) -> None:
        """Remove ended trials and add others; if there are none to train, wait briefly."""
        if self.trials:
            self._refill()
        else:
            self._look()
        while self._change_by_policies():
            self._refill()

    def _look(self) -> None:
        """Begin an array of waiting trials, if there are any."""
        if self._tried is not None:
            self._builder.forget_width(self._tried)
            self._tried = None
        answer = self._workers.ask(ask="look", worker=self._workers.worker.id)
        if "group" in answer:
            self._begin(answer)
        self._is_over = bool(answer.get("over", False))
        if not self.trials and not self._is_over:
            time.sleep(POLL_S)

    def steps_until_change(self) -> int | None:
        """1 while more trials may join; else until trials are offered again, or policies are asked."""
        if self.engine.free and self._assigned.may_get_more:
            return 1
        asked = ((trial.step, source) for trial in self.trials for source in trial.sources)
        steps = [due - step for step, source in asked if (due := source.next_due(step)) is not None]
        if self._members.can_change:
            steps.append(max(1, int(OFFER_S / max(self._step_s, 1e-6))))
        return min(steps, default=None)

    def _change_by_policies(self) -> bool:
        """Ask the policies of all trials, and apply what they request; whether a trial failed by it."""
        asked = [
            (slot, source)
            for slot, trial in enumerate(self.trials)
            if trial.asked_at != trial.step and not trial.has_reached and not trial.stops_early
            for source in trial.sources
            if is_due(source, trial.step)
        ]
        due = [(source, self.trials[slot].step) for slot, source in asked]
        for (slot, _), answer in zip(asked, find_requests(self._workers.group.from_first, due)):
            trial = self.trials[slot]
            trial.asked_at = trial.step
            try:
                if isinstance(answer, JobError):
                    raise answer
                for request in answer:
                    self._apply(request, trial)
            except JobError as failure:
                self._assigned.fail(trial.number, short(str(failure)), step=trial.step)
                self._release(slot)
        return bool(self._leaving)

    def _apply(self, request: ChangeRequest, trial: RunningTrial) -> None:
        """Change a trial between two steps, and record it."""
        change = request.change
        if not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, "a trial of a sweep")
        trial.change_batch(change, self._workers.group.size)
        self._assigned.count_goals(trial, trial.goals)
        kind = type(change).__name__
        changed = (trial.step, kind, encode(change), request.by, request.why, trial.number)
        self._workers.ask(ask="note", changes=[changed])

    def advance(self, steps: int) -> None:
        started = time.perf_counter()
        try:
            super().advance(steps)
        except Exception:
            for trial in self.trials:
                trial.step += self.engine.done
            raise
        self._step_s = (time.perf_counter() - started) / max(1, self.engine.done)

    def observe(self, result: IntervalResult) -> None:
        """Raise the loss of a worker of the group; requests are read before each interval."""
        if result.lost is not None:
            raise result.lost

    def _stream_of(self, trial: Trial) -> BatchStream:
        """The batches of a trial; a stream of another trial at the same position is shared."""
        shared = find_stream(trial, [each.stream for each in self.trials])
        if shared is not None:
            return shared
        pin, workers, in_stages = (
            self._workers.device.type == "cuda",
            self._workers.group,
            self._workers.is_pipelined,
        )
        return open_stream(
            self._workers.sets.for_pass(trial.settings),
            trial,
            workers.share,
            pin,
            workers.loads,
            in_stages,
            workers.sums,
        )

    def find_due(self) -> dict[int, Due]:
        """What is due, by slot; records losses, and ends trials that have diverged."""
        trials = self.trials
        due = {slot: each for slot, trial in enumerate(trials) if (each := trial.due()) is not None}
        if not due:
            return {}
        self.engine.collect_losses()
        self._assigned.note_losses([trials[slot] for slot in due if trials[slot].is_loss_due])
        diverged = [slot for slot in due if trials[slot].has_diverged]
        for slot in diverged:
            self._end(slot, "diverged", {})
        return {slot: each for slot, each in due.items() if slot not in diverged}

    def before_evaluation(self, due: Mapping[int, Due]) -> None:
        """Nothing to save: a failing evaluation ends only its trial."""

    def _begin(self, waiting: Mapping[str, Any]) -> None:
        """Build an array of waiting trials."""
        group = self.engine.group = waiting["group"]
        settings = with_values(self._workers.settings.train, waiting["values"])
        sets = self._workers.sets.of(settings)
        self._try_evaluation(settings, sets)
        try:
            self._builder.choose_width(group, settings, sets, waiting["share"])
        except Exception as failure:  # a user's model can fail in any way
            if (why := why_failed(failure)) is None:
                raise
            # Train it alone, so that the failure is recorded for this trial only; other trials may work.
            self._builder.train_one_by_one(group, why)
            self._tried = group
        if self._is_stop_requested():
            # Other workers may have returned their trials by now.
            return
        if joining := self._take(self._builder.width(group), begin=True):
            self._change([], joining)

    def _try_evaluation(self, settings: TrainSettings, sets: DataPair) -> None:
        """Evaluate the first test batches once, with the first trial that can be built."""
        if self._has_tried:
            return
        try:
            components = build_components(settings, self._workers.device, sets)
        except Exception as failure:  # a user's model can fail in any way; only its trial fails
            if why_failed(failure) is None:
                raise
            return
        self._has_tried = True
        if message := try_evaluation(components, settings, *self._workers.group.share):
            self._workers.warn_once(message)

    def _refill(self) -> None:
        """Remove ended trials, and ask for others in their slots."""
        self._offer_trials()
        leaving, self._leaving = sorted(self._leaving), []
        free = 0 if self.engine.closed else self.engine.free + len(leaving)
        may_ask = bool(free) and self._assigned.may_get_more
        if leaving or (may_ask and self._workers.group.from_first(self._is_time_to_ask)):
            self._change(leaving, self._take(free) if free else [])

    def _is_time_to_ask(self) -> bool:
        return time.monotonic() - self._asked > POLL_S

    def _take(self, count: int, begin: bool = False) -> list[JoiningTrial]:
        """Up to `count` trials that the coordinator assigns, ready to join."""
        self._asked = time.monotonic()
        return self._assigned.take(self.engine.group, count, begin)

    def _change(self, leaving: Sequence[int], joining: Sequence[JoiningTrial]) -> None:
        if not leaving and not joining:
            return
        if joining:
            admission = self.engine.admit(joining)
            joining = admission.joining
            for number, why in admission.failed.items():
                self._assigned.fail(number, why)
            for each in admission.waiting:
                self._assigned.give_back(each.trial.number)
            if admission.apart:
                separate = [each.trial.number for each in admission.apart]
                self._workers.ask(ask="split", worker=self._workers.worker.id, trials=separate)
                self._assigned.held.difference_update(separate)
        self.engine.apply(TrialsChange(tuple(leaving), tuple(joining)))
        self._report_array()

    def _separate(self, failure: NotFusedError) -> None:
        """From now on train the trials of this group one by one, or fewer at once, from their checkpoints."""
        if isinstance(failure, TooWideError):
            self._builder.narrow(self.engine.group, len(self.trials), str(failure))
        else:
            self._builder.train_one_by_one(self.engine.group, str(failure))
        self._dissolve()

    def _fail(self, failure: TrialsFailedError) -> None:
        """End trials that failed; the others of their array continue from their checkpoints."""
        steps = {trial.number: trial.step for trial in self.trials}
        for number, why in failure.reasons.items():
            # Workers that average weights are at other steps, and do not report together with this one.
            self._assigned.fail(number, why, failure.__cause__, steps.get(number, 0), self._workers.averages)
        if not self._workers.group.is_alone:
            # The other workers of the group are in the middle of the same step: the sweep ends, and can be
            # resumed without the trial.
            raise failure.__cause__ or failure
        self._dissolve()

    def _dissolve(self) -> None:
        """Return all trials, for other arrays to continue from their last checkpoints."""
        for trial in sorted(self._assigned.held):
            self._assigned.give_back(trial)
        self._leaving = []
        self.engine.close()
        self._report_array()

    def _offer_trials(self) -> None:
        """In an elastic sweep, return trials for idle workers."""
        if not self._offers or self._builder.verifier.has_python_state(self.engine.group):
            return
        self._offered = time.monotonic()
        staying = [slot for slot in range(len(self.trials)) if slot not in self._leaving]
        left_s = self._step_s * max((self._steps_left(slot) for slot in staying), default=0)
        answer = self._workers.ask(ask="spare", worker=self._workers.worker.id, left_s=left_s)
        count = min(answer["count"], len(staying) - 1)
        if count > 0:
            self.engine.collect_losses()
            for slot in staying[-count:]:
                self._save_and_return(slot)
            self._leaving += staying[-count:]

    def _steps_left(self, slot: int) -> int:
        """Steps until the trial ends or, in a synchronous search, waits for others."""
        trial = self.trials[slot]
        return (trial.until if self._waits else trial.steps) - trial.step

    @property
    def _waits(self) -> bool:
        """Whether trials wait for each other before they are compared."""
        return self._workers.settings.search.kind in ("halving", "pbt")

    def _report_array(self) -> None:
        """Report the trials of the array, whether they are fused, and why not."""
        numbers = [trial.number for trial in self.trials]
        self._workers.ask(
            ask="array",
            worker=self._workers.worker.id,
            trials=numbers,
            fused=self.engine.is_fused,
            why=self.engine.why,
        )

    def after_evaluation(self, due: Mapping[int, Due], metrics: Mapping[int, dict[str, float]]) -> None:
        reached = {}
        for slot, each in due.items():
            trial = self.trials[slot]
            # In an elastic sweep, states are also saved after each evaluation, since a worker may be lost.
            is_save_due = each.checkpoint or (self._members.can_change and each.evaluation)
            if trial.stops_early:
                self._end(slot, "early-stop", metrics[slot])
            elif trial.has_reached:
                reached[slot] = each
            elif is_save_due and not self._save(slot):
                self._end(slot, "diverged", {})
        self._reach(reached, metrics)

    def evaluate(self, slots: Sequence[int]) -> dict[int, dict[str, float]]:
        if slots and self._workers.sets.of(self.trials[slots[0]].settings)[1] is None:
            return {slot: {} for slot in slots}
        return super().evaluate(slots)

    def record_evaluation(self, metrics: Mapping[int, dict[str, float]], seconds: float) -> None:
        trials = [self.trials[slot] for slot in metrics]
        points = [(t.number, t.step, finite_numbers(each)) for t, each in zip(trials, metrics.values())]
        self._workers.ask(ask="note", metrics=points)

    def _reach(self, due: Mapping[int, Due], metrics: Mapping[int, dict[str, float]]) -> None:
        """Report trials at their goals, together; they leave the array unless they continue at once."""
        reached, results = [], []
        for slot, each in due.items():
            trial = self.trials[slot]
            result = trial.result(metrics[slot])
            # A trial that waits for others continues from its checkpoint; an ended one is saved if it is the
            # best.
            is_due = self._waits or self._members.can_change or each.checkpoint
            is_wanted = self._assigned.is_wanted(trial, result) if trial.step >= trial.steps else is_due
            if is_wanted and not self._save(slot):
                self._end(slot, "diverged", {})
                continue
            reached.append(slot)
            results.append((trial.number, trial.step, *result.values()))
        if not results:
            return
        answer = self._workers.ask(ask="report", worker=self._workers.worker.id, results=results)
        for slot, until in zip(reached, answer["until"]):
            if until == 0:
                self._release(slot)
            else:
                self.trials[slot].reach(until)

    def _end(self, slot: int, state: str, metrics: dict[str, float]) -> None:
        """Report a trial that diverged or stopped early."""
        trial = self.trials[slot]
        result = trial.result(metrics)
        if state != "diverged" and self._assigned.is_wanted(trial, result) and not self._save(slot):
            state, result["metrics"] = "diverged", {}
        self._workers.ask(
            ask="stop",
            worker=self._workers.worker.id,
            trial=trial.number,
            step=trial.step,
            state=state,
            **result,
        )
        self._release(slot)

    def _release(self, slot: int) -> None:
        """Remove the trial, whose result is reported, from the array before the next step."""
        self._leaving.append(slot)
        self._assigned.held.discard(self.trials[slot].number)

    def _save(self, slot: int) -> bool:
        return self._assigned.save(self.trials[slot], self.engine.state(slot))

    def _save_and_return(self, slot: int) -> None:
        trial = self.trials[slot]
        self._save(slot)
        self._assigned.give_back(trial.number, trial.step)

    def _save_and_return_all(self) -> None:
        """Save every trial of the array and return it to the coordinator."""
        self.engine.collect_losses()
        for slot in range(len(self.trials)):
            if slot not in self._leaving:
                self._save_and_return(slot)
        self._leaving = []
        self.engine.close()
        if self._members.can_change:
            self._report_array()
