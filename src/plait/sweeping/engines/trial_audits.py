"""Which steps of fused trials are audited, and what is reported of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.data.loader import Batch
from plait.sweeping.array_workers import ArrayWorkers
from plait.sweeping.engines.audited_step import ADVICE, AuditedTrial, most_at_once
from plait.sweeping.trials.running_trial import RunningTrial
from plait.training.audit.record import DifferenceError
from plait.training.audit.schedule import next_audited
from plait.training.engines.train_step import TrainStep
from plait.training.fused.fused_components import FusedComponents
from plait.training.trial import UNKNOWN_STEPS
from plait.training.worker_group import ALONE

if TYPE_CHECKING:
    from plait.pipeline.executor import PipelineExecutor
    from plait.sweeping.engines.array_stages import FusedStages
    from plait.training.engines.pipeline import StageAudit

log = logging.getLogger(__name__)


class TrialAudits:
    """Audits steps of fused trials: the first step of each in an array, and then one trial in turn.

    Workers that sum gradients audit together; each of those that average weights audits its own updates, and
    they exchange at the end of an interval what they found.
    """

    def __init__(self, workers: ArrayWorkers) -> None:
        self._workers = workers
        self._settings = workers.settings.train
        self.array: FusedComponents | None = None
        self.trials: Sequence[RunningTrial] = ()
        # Steps of this worker so far, and the step at which each trial was last audited.
        self._steps = 0
        self._last: dict[int, int] = {}
        self._audited: dict[int, AuditedTrial] = {}
        self._done = 0
        # What this worker found and has not reported: trial, step, seconds, largest difference, differences.
        self._found: list[Sequence[Any]] = []

    def forget(self, number: int) -> None:
        """The trial is new in an array."""
        self._last.pop(number, None)

    def begin(
        self, step: TrainStep, done: int, share: int, batches: Sequence[Batch], factors: Sequence[float]
    ) -> None:
        """Copy the trials whose next step is audited."""
        self._audited, self._done = {}, done
        array, slots = self.array, self._due_slots()
        if array is None or not slots:
            return
        if self._workers.averages_gradients:
            self._workers.warn_once("audit: the steps of trials under average: gradients are not audited")
            return
        group = ALONE if self._workers.averages else self._workers.group
        self._audited = {
            slot: AuditedTrial.of_array(array, slot, batches[slot], factors[slot], group)
            for slot in slots
            if batches[slot].count or not self._workers.averages
        }

    def _due_slots(self) -> list[int]:
        """The trials whose next step is audited, in the order of their turns."""
        known, array = self._last, self.array
        newcomers = [slot for slot, trial in enumerate(self.trials) if trial.number not in known]
        is_newcomers = bool(newcomers) and self._settings.verify.audit == "doubling"
        if array is None or not (is_newcomers or self._steps_until_audit() == 0):
            return []
        if array.verdict.has_python_state:
            self._say_kept_in_python()
            return []
        in_turn = sorted(range(len(self.trials)), key=lambda slot: known.get(self.trials[slot].number, -1))
        return newcomers[: most_at_once(array)] or in_turn[:1]

    def begin_in_stages(
        self, stages: FusedStages, pipeline: PipelineExecutor
    ) -> tuple[int, StageAudit | None]:
        """The most steps until an audit, or (1, that of the next step); of one trial at a step."""
        from plait.sweeping.engines.audited_stages import AuditedStageTrial  # slow to import

        workers, slots = self._workers, self._due_slots()
        if slots and not stages.draws_as_whole:
            workers.warn_once("audit: trials whose stages do not follow one another are not audited")
        elif slots:
            trial = self.trials[slots[0]]
            self._last[trial.number] = self._steps

            def on_found(found: Sequence[Sequence[Any]]) -> None:
                self._found += [(trial.number, trial.step + 1, *each) for each in found]
                self.report()

            return 1, AuditedStageTrial(
                stages, pipeline, workers.group, slots[0], trial, on_found, workers.warn_once
            )
        return max(1, self._steps_until_audit()), None

    def count_steps(self, steps: int) -> None:
        """Count the steps of an interval in stages."""
        self._steps += steps

    def averaging_before_update(self) -> AbstractContextManager[None]:
        """Nothing to do: these updates are not audited."""
        return nullcontext()

    def end(self, step: TrainStep, losses: Tensor) -> bool:
        for slot, alone in self._audited.items():
            trial = self.trials[slot]
            self._last[trial.number] = self._steps
            assert self.array is not None
            largest, differences = alone.compare(losses[slot], self.array.state(slot))
            if alone.uses_python_state:
                self._say_kept_in_python()
            else:
                texts = [str(each) for each in differences[:3]]
                number = trial.step + self._done + 1
                self._found.append((trial.number, number, alone.seconds, largest, texts))
        if self._audited and not self._workers.averages:
            self.report()
        self._steps += 1
        return False

    def report(self) -> None:
        """Record what was found; all workers of the group call it together."""
        found, self._found = self._found, []
        by_step: dict[tuple[int, int], list[Any]] = {}
        for trial, step, *rest in itertools.chain(*self._workers.group.of_all(found)):
            by_step.setdefault((trial, step), []).append(rest)
        for (trial, step), each in sorted(by_step.items()):
            seconds, largest, texts = zip(*each)
            differences = list(dict.fromkeys(itertools.chain(*texts)))
            self._record(trial, step, max(seconds), max(largest), differences)

    def _record(
        self, trial: int, step: int, seconds: float, largest: float, differences: Sequence[str]
    ) -> None:
        """Record an audited step of a fused trial; DifferenceError if a difference must stop the sweep."""
        texts = list(differences[:3])
        self._workers.ask(
            ask="audited",
            trial=trial,
            step=step,
            seconds=round(seconds, 6),
            largest=largest,
            differences=texts,
        )
        if not texts:
            return
        message = f"audit: step {step} of trial {trial} is not what it is alone: {'; '.join(texts)}; {ADVICE}"
        if self._settings.verify.on_difference == "stop":
            raise DifferenceError(message)
        log.warning("%s", message)

    def _steps_until_audit(self) -> int:
        """How many steps of this worker there are before the next that is audited."""
        following = next_audited(self._settings, self._steps)
        return UNKNOWN_STEPS if following is None else following - self._steps

    def _say_kept_in_python(self) -> None:
        self._workers.warn_once(
            "audit: the steps of fused trials whose forward keeps numbers in Python are not audited; "
            "keep such state in buffers"
        )
