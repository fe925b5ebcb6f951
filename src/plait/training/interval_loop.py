"""Runs in stretches: workers go on without looking up until an evaluation or a checkpoint is due."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import Any

from plait.core.events import Event, EventLog
from plait.data.sampler import GlobalBatch
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.training.loop import Trainer


class StretchTrainer(Trainer, ABC):
    """A trainer that takes many steps at once; every worker has events of its own to record."""

    def __init__(self, worker: Worker, settings: TrainSettings, parts: Components, folder: RunDir) -> None:
        super().__init__(worker, settings, parts, folder)
        self._events = EventLog(folder.events(worker.rank), worker.rank) if worker.rank else None

    def run(self, resume: bool) -> dict[str, Any]:
        result = super().run(resume)
        self._close()
        if self._events is not None:
            self._events.close()
        return result

    @abstractmethod
    def _close(self) -> None:
        """End the links to the other workers."""

    @abstractmethod
    def _take_stretch(self, steps: list[GlobalBatch]) -> bool:
        """Work on these steps; whether someone wanted to stop before their end."""

    def train(self) -> str:
        """Take stretches until the last step, a request to stop, or the end of patience; which it was."""
        reason = "early-stop" if self.patience.is_over() else "finished"
        while reason == "finished" and self.step < self.steps:
            end = min(self.steps, self._next_due())
            stopped = self._take_stretch(list(itertools.islice(self._order(), end - self.step)))
            if self.step >= self.steps:
                break
            self._evaluate_or_save()
            if self.patience.is_over():
                reason = "early-stop"
            elif stopped:
                reason = "stopped"
        return reason

    def _next_due(self) -> int:
        """The next step after which something is due."""
        periods = [self.settings.checkpoint.every_steps, self.settings.evaluate.every_steps]
        return min(self.step + each - self.step % each for each in periods if each)

    def _note(self, event: Event) -> None:
        """Record an event of this worker's."""
        if self._events is None:
            self.recorder.note(event)
        else:
            self._events.record(event)
