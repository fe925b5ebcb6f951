"""The trials of a sweep: the progress of each, and which of them continue. The coordinator owns it.

Decisions are recorded as events before a worker is answered, so a scheduler that replays the events of a
killed sweep continues from the same state: a decision that was not recorded is made again from the same
results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from plait.core import run_events
from plait.core.codec import finite
from plait.core.events import Event
from plait.data.seeding import mix
from plait.schema.results import TrialResult, numbers
from plait.schema.settings import TrainSettings
from plait.sweeping.search.pruning import exploit, survivors
from plait.sweeping.search.study import NO_STUDY, StudyTrials, value_of
from plait.sweeping.search.tpe import Past
from plait.sweeping.search.values import Search
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import array_key, is_fusable, with_values
from plait.sweeping.trials.scheduled_trial import Report, ScheduledTrial, number_of
from plait.workloads.metrics import find_modes

# Optuna's TPE draws this many trials at random before it learns from results.
AT_RANDOM = 10
# An array that ends within this time is not divided: building another array takes a few seconds.
HAND_OVER_S = 5.0


class TrialScheduler:
    """All trials of a sweep. `record` writes events to disk atomically; `copy` copies weights between trials.

    `data_of` returns a key that is equal for trials which can share a data set. If it or `steps_of` raises
    because the data are not known yet, nothing has changed, and the call is repeated later.
    """

    def __init__(
        self,
        settings: SweepSettings,
        workers: int,
        metric: str,
        steps_of: Callable[[TrainSettings], int],
        record: Callable[..., None],
        copy: Callable[[int, int], None],
        data_of: Callable[[TrainSettings], object] = lambda settings: None,
        study: StudyTrials = NO_STUDY,
    ) -> None:
        self.settings = settings
        self.search = Search(settings, study)
        self.metric = metric
        self.mode = find_modes(settings.train.evaluate, settings.train.loss)[metric]
        self.trials: list[ScheduledTrial] = []
        # How many workers share the trials; it may change.
        self.workers = workers
        self._steps_of = steps_of
        self._record = record
        self._copy = copy
        self._data_of = data_of
        # The trials that reached each rung, in order: ASHA compares a trial with those before it.
        self._arrivals: dict[int, list[int]] = {}
        self._copied: set[tuple[int, int]] = set()

    def open(self, past: Iterable[Event] = ()) -> None:
        """Replay the events of an earlier part of the sweep, and draw all trials that can be drawn."""
        for event in past:
            self._replay(event)
        if not self.search.learns:
            while len(self.trials) < self.search.total:
                self._draw()
        if self.search.waits:
            self._finish_rung()
        for trial in self.trials:
            # The sweep may have been killed between a result and the decision about it.
            if not self.search.waits and trial.reached and not trial.has_ended:
                self._decide(trial)

    @property
    def is_over(self) -> bool:
        return len(self.trials) == self.search.total and all(trial.has_ended for trial in self.trials)

    @property
    def ended(self) -> int:
        return sum(trial.has_ended for trial in self.trials)

    def best(self) -> ScheduledTrial | None:
        """The trial with the best result among the finished ones."""
        complete = [t for t in self.trials if t.is_complete]
        return min(complete, key=ScheduledTrial.standing) if complete else None

    def table(self) -> tuple[TrialResult, ...]:
        """All trials, best first: finished ones by result, then the others by progress."""
        ordered = sorted(self.trials, key=ScheduledTrial.standing)
        return tuple(
            TrialResult(t.number, t.state, t.step, dict(t.values), numbers(t.metrics), t.train_loss, t.why)
            for t in ordered
        )

    def waiting(self, group: str | None = None) -> list[ScheduledTrial]:
        """The waiting trials of `group`, or of the group that is next."""
        self._draw_more(self.workers)
        waiting = [trial for trial in self.trials if trial.state == "waiting"]
        chosen = group or (waiting[0].group if waiting else None)
        return [trial for trial in waiting if trial.group == chosen]

    def would_be_best(self, number: int, metrics: Mapping[str, Any], train_loss: float | None) -> bool:
        """Whether a trial that ended with these results would be the best so far."""
        best, result = self.best(), self._result(metrics, train_loss)
        if best is None or best.number == number:
            return True
        return (number_of(result), number) < (number_of(best.result), best.number)

    def take(
        self, group: str, count: int, begin: bool, among: int | None = None, worker: int = 0
    ) -> list[ScheduledTrial]:
        """Start up to `count` waiting trials of `group`, which `worker` trains.

        A worker that begins an array gets its share among `among` workers (default: all).
        """
        self._draw_more(count)
        fitting = self.waiting(group)
        if begin:
            count = min(count, math.ceil(len(fitting) / (among or self.workers)))
        for trial in fitting[:count]:
            trial.state, trial.worker = "running", worker
        return fitting[:count]

    def report(self, reports: Sequence[Report]) -> list[int]:
        """Record results of trials at their goals; returns the next goal of each, or 0 if it leaves.

        Trials that reach a goal together, in an array, are judged by the same results.
        """
        current = [report for report in reports if not self.trials[report.trial].has_ended]
        new = self._record_results(current)
        return [self._answer(report, report.trial in new) if report in current else 0 for report in reports]

    def _answer(self, report: Report, is_new: bool) -> int:
        trial = self.trials[report.trial]
        if report.step >= trial.steps:
            self._end(trial, "finished")
        elif not self.search.waits:
            return self._decide(trial)
        elif is_new:
            trial.state = "held"
        else:  # repeated: the worker may not have received the first answer
            self.give_back(trial.number)
            return 0
        if self.search.waits:
            self._finish_rung()
        return 0

    def _decide(self, trial: ScheduledTrial) -> int:
        """The search's rule at the last rung that a trial reached: its next goal, or 0."""
        rung = len(trial.reached) - 1
        # Trials that arrived before it and with it.
        arrivals = self._arrivals[rung][: trial.judged[rung]]
        before = [self.trials[n].reached[rung] for n in arrivals if n != trial.number]
        if rung != trial.last and not self.search.goes_on(trial.number, trial.reached[rung], before):
            return self._end(trial, "dropped")
        return trial.goal

    def stop(
        self,
        number: int,
        step: int,
        state: str,
        metrics: Mapping[str, Any],
        train_loss: float | None,
        why: str = "",
    ) -> None:
        """Record that a trial diverged, stopped early or failed."""
        trial = self.trials[number]
        if trial.has_ended:
            return
        has_result = state not in ("diverged", "failed")
        self._record_results([Report(number, step, metrics, train_loss, has_result)])
        trial.why = why
        # In population-based training it continues as a copy of another trial.
        if state == "diverged" and self.search.settings.kind == "pbt" and trial.rung_at(step) < trial.last:
            trial.state = "held"
        else:
            self._end(trial, state)
        if self.search.waits:
            self._finish_rung()

    def give_back(self, number: int) -> None:
        """Return a running trial to the waiting ones; it continues from its newest checkpoint."""
        trial = self.trials[number]
        if trial.state == "running":
            trial.state = "waiting"

    def count_goals(self, number: int, goals: Sequence[int]) -> None:
        """Set the steps of a trial's goals ahead, which a change of its batch size has moved."""
        event = run_events.TrialGoals(number, tuple(goals))
        self._record(event)
        self._replay(event)

    def of_worker(self, worker: int) -> list[ScheduledTrial]:
        """The trials that a worker trains."""
        return [trial for trial in self.trials if trial.is_of(worker)]

    def to_hand_over(self, worker: int, idle: int, left_s: float) -> int:
        """How many of its trials `worker`, whose array ends in `left_s`, must return for `idle` workers.

        The worker with the most trials divides them among the idle workers and itself.
        """
        counts = Counter(trial.worker for trial in self.trials if trial.state == "running")
        if not idle or left_s < HAND_OVER_S or not counts:
            return 0
        if worker != max(counts, key=lambda each: (counts[each], -(each or 0))):
            return 0
        return counts[worker] - math.ceil(counts[worker] / (idle + 1))

    def split(self, numbers: Sequence[int]) -> None:
        """Move trials that cannot share an array with the others of their group to a new group."""
        for number in numbers:
            self.trials[number].group += "+"
            self.give_back(number)

    def expected(self, waiting: Sequence[ScheduledTrial]) -> int:
        """Upper bound on how many trials arrays of the waiting group will hold.

        A search that learns from results draws at most a quarter of all trials at once, or its initial random
        trials: trials that are drawn together cannot learn from each other.
        """
        undrawn = self.search.total - len(self.trials)
        if not self.search.learns:
            return len(waiting) + undrawn
        return min(len(waiting) + undrawn, max(AT_RANDOM, self.search.total // 4))

    def separating_keys(self, trial: ScheduledTrial) -> list[str]:
        """The keys whose values keep a trial from sharing an array with another."""
        others = [other for other in self.trials if other.group != trial.group]
        if not others:
            return []

        def differing(other: ScheduledTrial) -> list[str]:
            return [key for key, value in trial.values.items() if other.values[key] != value]

        def group(values: Mapping[str, Any]) -> tuple[bool, str]:
            settings = with_values(self.settings.train, values)
            return is_fusable(settings), array_key(settings)

        nearest = min(others, key=lambda other: (len(differing(other)), other.number))
        keys, here = differing(nearest), group(trial.values)
        return [key for key in keys if group({**trial.values, key: nearest.values[key]}) != here] or keys

    def _draw_more(self, count: int) -> None:
        """Draw trials until `count` wait."""
        waiting = sum(trial.state == "waiting" for trial in self.trials)
        while waiting < count and len(self.trials) < self.search.total:
            self._draw()
            waiting += 1

    def _draw(self) -> None:
        number = len(self.trials)
        known = self.trials if self.search.learns else ()
        past = [Past(t.values, t.result if t.reached else None, t.step, t.state) for t in known]
        values = self.search.values(number, past)
        settings = with_values(self.settings.train, values)
        group = array_key(settings) if is_fusable(settings) else f"alone-{number}"
        if (data := self._data_of(settings)) is not None:
            group += f"-{data}"
        drawn = run_events.TrialDrawn(number, dict(values), self._steps_of(settings), group)
        self._add(drawn)
        self._record(drawn)

    def _add(self, drawn: run_events.TrialDrawn) -> None:
        settings, goals = with_values(self.settings.train, drawn.values), self.search.goals(drawn.steps)
        self.trials.append(
            ScheduledTrial(drawn.trial, drawn.values, settings, drawn.group, goals, list(goals))
        )

    def _record_results(self, reports: Sequence[Report]) -> set[int]:
        """Record results in one write; returns the trials whose results are new."""
        # Sorted by rung and by arrival at the rung before: trials that arrived earlier there come earlier
        # here. They arrive at once only after a kill, when some were restarted.
        new: dict[tuple[int, int], list[Report]] = {}
        for report in reports:
            trial = self.trials[report.trial]
            trial.load_result(report)
            rung = trial.rung_at(report.step)
            if rung not in trial.reached:
                new.setdefault((rung, trial.judged.get(rung - 1, 0)), []).append(report)
        events = []
        for (rung, _), together in sorted(new.items(), key=lambda item: item[0]):
            judged = len(self._arrivals.get(rung, ())) + len(together)
            for report in together:
                result = self._result(report.metrics, report.train_loss) if report.has_result else math.nan
                values = (report.step, finite(result), dict(report.metrics), report.train_loss)
                events.append(run_events.TrialReached(report.trial, *values, judged))
                self._arrive(self.trials[report.trial], rung, result, judged)
        if events:
            self._record(*events)
        return {event.trial for event in events}

    def _arrive(self, trial: ScheduledTrial, rung: int, result: float, judged: int) -> None:
        arrivals = self._arrivals.setdefault(rung, [])
        arrivals.append(trial.number)
        trial.reached[rung] = result
        trial.judged[rung] = judged or len(arrivals)

    def _result(self, metrics: Mapping[str, Any], train_loss: float | None) -> float:
        value = value_of(self.metric, metrics, train_loss)
        return value if self.mode == "min" or not metrics else -value

    def _end(self, trial: ScheduledTrial, state: str) -> int:
        trial.state = state
        result = (state, dict(trial.metrics), trial.train_loss, trial.why)
        self._record(run_events.TrialEnded(trial.number, trial.step, *result))
        return 0

    def _finish_rung(self) -> None:
        """Compare trials once all that continue have reached the same rung."""
        running = [trial for trial in self.trials if not trial.has_ended]
        if not running or any(trial.state != "held" for trial in running):
            return
        rung = min(len(trial.reached) for trial in running) - 1
        ready = [trial for trial in running if len(trial.reached) - 1 == rung]
        # If a trial is beyond this rung, the comparison was made before the sweep was killed.
        if all(len(trial.reached) - 1 <= rung for trial in self.trials):
            self._compare(rung)
        for trial in ready:
            if not trial.has_ended:
                trial.state = "waiting"

    def _compare(self, rung: int) -> None:
        """Halving drops the worse trials; population-based training replaces them."""
        # Including those already dropped here: after a kill, the same decisions must follow.
        here = [trial for trial in self.trials if rung in trial.reached]
        if self.search.settings.kind == "pbt":
            self._exploit({t.number: t.reached[rung] for t in here if not t.has_ended}, rung)
            return
        kept = survivors({t.number: t.reached[rung] for t in here}, self.search.settings.eta)
        for trial in here:
            if trial.number not in kept and not trial.has_ended:
                self._end(trial, "dropped")

    def _exploit(self, results: Mapping[int, float], rung: int) -> None:
        dimensions = {dimension.key: dimension for dimension in self.settings.over}
        for copy in exploit(results, list(dimensions), seed=mix(self.search.settings.seed, rung)):
            if (copy.loser, rung) in self._copied:
                continue
            winner, loser = self.trials[copy.winner], self.trials[copy.loser]
            values = {
                key: dimensions[key].scaled(winner.values[key], factor)
                for key, factor in copy.factors.items()
            }
            self._copy(copy.winner, copy.loser)
            loser.step = winner.step
            self._change(loser, values, rung)
            self._record(run_events.TrialCopied(loser.number, winner.number, loser.step, values))
        for number, result in results.items():
            trial = self.trials[number]
            has_loss = trial.metrics or trial.train_loss is not None
            if math.isnan(result) and not has_loss and (number, rung) not in self._copied:
                self._end(trial, "diverged")

    def _change(self, trial: ScheduledTrial, values: Mapping[str, Any], rung: int) -> None:
        trial.values, trial.settings = values, with_values(self.settings.train, values)
        self._copied.add((trial.number, rung))

    def _replay(self, event: Event) -> None:
        match event:
            case run_events.TrialDrawn():
                self._add(event)
            case run_events.TrialReached():
                trial = self.trials[event.trial]
                trial.load_result(event)
                rung = trial.rung_at(event.step)
                if rung not in trial.reached:
                    result = math.nan if event.result is None else event.result
                    self._arrive(trial, rung, result, event.judged)
                trial.state = "held" if self.search.waits and rung != trial.last else "waiting"
            case run_events.TrialEnded():
                trial = self.trials[event.trial]
                trial.load_result(event)
                trial.state, trial.why = event.state, event.why
            case run_events.TrialCopied():
                trial = self.trials[event.trial]
                trial.step = event.step
                # All that go on have reached it.
                self._change(trial, event.values, len(trial.reached) - 1)
            case run_events.TrialGoals():
                self.trials[event.trial].goals[-len(event.goals) :] = event.goals
