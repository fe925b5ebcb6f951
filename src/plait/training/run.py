"""The state that the loop and the engine of a run share: worker, components, progress and record."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist

from plait.adapt.history import SignalHistory
from plait.data.loader import Batch, BatchStream
from plait.data.sampler import GlobalBatch
from plait.data.streams import has_state
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.training.audit.record import AuditRecord
from plait.training.batch_streams import open_stream, sample_order
from plait.training.components import Components
from plait.training.run_record import RunRecorder
from plait.training.trial import EarlyStopping, Trial


class Run:
    """What a loop and its engine share; only the loop advances the trial."""

    def __init__(
        self, worker: Worker, settings: TrainSettings, components: Components, folder: RunDir
    ) -> None:
        self.worker = worker
        # As the job says; policies may change those of the settings.
        self.job_sync, self.job_topology = settings.sync, settings.topology
        # One; its engine has the same list.
        self.trials = [Trial(settings, EarlyStopping(settings.early_stop, components.modes))]
        self.components = components
        self.folder = folder
        self.metrics = RunRecorder(worker, settings, components, folder)
        self.audits = AuditRecord(self.metrics, settings.verify.on_difference == "stop")
        self.trial.signals = SignalHistory(self.metrics.signals)
        # The total steps of the run, if known.
        self.total_steps: int | None = None
        # Seconds that opening the present engine took, for plans that may change.
        self.opened_s = 0.0
        # The version of the membership that an engine was opened in last, and how many were before it there.
        self._openings = (0, 0)

    @property
    def trial(self) -> Trial:
        return self.trials[0]

    @trial.setter
    def trial(self, trial: Trial) -> None:
        self.trials[0] = trial

    @property
    def settings(self) -> TrainSettings:
        """The settings with all changes applied."""
        return self.trial.settings

    @settings.setter
    def settings(self, settings: TrainSettings) -> None:
        self.trial.settings = settings

    @property
    def batch_size(self) -> int:
        """Samples of a step over all workers, from now on."""
        return self.trial.batch.size

    def lr(self, step: int) -> float:
        """The learning rate of the first parameter group."""
        return self.components.base_lrs[0] * self.trial.lr_factor(step)

    def name_of_opening(self) -> str:
        """A unique name for the links of an engine that is being opened, the same on all members."""
        version, count = self.worker.memberships.current.version, self._openings[1] + 1
        self._openings = (version, count if self._openings[0] == version else 0)
        return "{}.{}".format(*self._openings)

    def order(self) -> Iterator[GlobalBatch]:
        """The next batches, as sample numbers."""
        return sample_order(self.components.train_set, self.trial)

    def own_batches(self) -> BatchStream:
        """This worker's share of the next batches."""
        settings, worker, source = self.settings, self.worker, self.components.train_set
        stream = open_stream(
            source,
            self.trial,
            (worker.rank, worker.world_size),
            pin=self.components.device.type == "cuda",
            group=dist.group.WORLD if worker.world_size > 1 else None,
            epochs=settings.epochs,
            last=None if settings.steps is None else settings.steps - self.trial.step,
        )
        if not source.is_stream or not has_state(source.dataset):
            return stream
        return BatchStream(self._warned(stream), stream.position, stream.order)

    def _warned(self, stream: BatchStream) -> Iterator[Batch]:
        """The batches, with a warning if no checkpoint can hold the position of the stream."""
        for number in itertools.count():
            if (batch := stream.next()) is None:
                return
            if number == 0 and batch.after.stream is None:
                self.metrics.warn(
                    "the stream's state_dict holds values that a checkpoint cannot keep (expected numbers, "
                    "text, None, lists, and dicts with text as keys); a resumed run will skip the samples "
                    "that were used"
                )
            yield batch

    def broadcast_weights(self) -> None:
        """Broadcast parameters and buffers from the first worker."""
        if self.worker.world_size == 1:
            return
        model = self.components.model
        with torch.no_grad():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                dist.broadcast(tensor, src=0)
