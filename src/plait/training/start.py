"""How a run begins or goes on: from its newest good checkpoint, with the same state on all workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.adapt.changes import ChangeSource, SavedSource
from plait.comm.collectives import all_gather_values
from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError, JobError
from plait.data.requirements import check_same_data, check_same_order, fingerprint_of, order_id
from plait.data.sampler import Position
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.checks.replicas import check_kept
from plait.training.checks.same_data import check_data
from plait.training.checks.stateful_loss import check_loss
from plait.training.engine import Starting
from plait.training.run import Run


def check_order(
    progress: Mapping[str, Any], position: Position, settings: TrainSettings, samples: int | None
) -> None:
    """Refuse to go on in the middle of an epoch whose samples would come in another order."""
    if position.sample == 0:
        return
    now = {"seed": settings.seed, "data.shuffle": settings.data.shuffle, "samples": samples}
    for key, value in now.items():
        before = progress.get(key.rpartition(".")[2], value)
        if before != value:
            raise JobError(
                f"{key}: found {value!r}, but the run was trained with {before!r}, and it is in the middle "
                f"of an epoch: samples would be repeated and left out; resume with {before!r}, or start a "
                f"new run"
            )


def check_end(step: int, position: Position, settings: TrainSettings) -> None:
    """Refuse to go on to an end that the run is beyond."""
    if settings.steps is not None and step > settings.steps:
        raise JobError(
            f"steps: found {settings.steps}, but the run has made {step} steps; give {step} or more, or "
            f"start a new run"
        )
    epochs = settings.epochs
    if epochs is not None and (position.epoch, position.sample) > (epochs, 0):
        part = " and a part of the next" if position.sample else ""
        raise JobError(
            f"epochs: found {epochs}, but the run has come through {position.epoch}{part}; give as many or "
            f"more, or start a new run"
        )


class RunStart:
    """A run's beginning: from its newest good checkpoint, the same on all workers."""

    def __init__(self, run: Run, engine: Starting, sources: Sequence[ChangeSource] = ()) -> None:
        self.run = run
        self._sources = tuple(sources)
        self.engine = engine

    def start(self, resume: bool) -> None:
        """Load the state from which all workers continue."""
        if resume:
            self._restore()
        self._agree_on_start()
        check_data(self.run)
        check_loss(self.run)
        check_kept(self.run)

    def _checkpoint(self, state: EngineState) -> Checkpoint:
        run = self.run
        return Checkpoint(
            run.trial.step, state.model, state.optimizer, self._progress(), state.sync, state.written
        )

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        run = self.run
        return {
            **run.trial.progress(run.parts.scaler.state_dict(), run.worker.world_size),
            "shuffle": run.settings.data.shuffle,
            "samples": run.parts.train_set.length,
            "order": order_id(run.parts.train_set.dataset, run.settings),
            "fingerprint": fingerprint_of(run.parts.train_set.dataset),
            "gradient_noise": run.noise.state(),
            "policies": [source.state() for source in self._sources if isinstance(source, SavedSource)],
        }

    def _restore(self) -> None:
        """Load the newest checkpoint that is complete and of this model; record those that are not."""
        run, refused = self.run, list[str]()

        def refuse(path: Path, why: str) -> None:
            refused.append(why)
            run.metrics.refused(path, why)

        def use(path: Path) -> bool:
            self._load_checkpoint(self.engine.read(path))
            return True

        folder = run.folder.checkpoints
        if checkpoints.newest(folder, use, refuse):
            return
        if refused:
            raise CheckpointError(f"no checkpoint below {folder} can be used; the newest: {refused[0]}")
        run.metrics.warn(f"no checkpoint below {folder}; starting from the first step")

    def _load_checkpoint(self, state: Checkpoint) -> None:
        """Continue from a checkpoint; CheckpointError changes nothing."""
        run, progress = self.run, state.progress
        checkpoints.check_optimizer(progress, run.settings.optimizer.kind)
        check_same_data(progress, run.parts.train_set.dataset, run.settings.data)
        trial = replace(run.trial, early_stopping=replace(run.trial.early_stopping))
        trial.load(state.step, progress)
        try:
            loss_scale = progress["loss_scale"]
            policies = list(progress.get("policies", ()))
            noise = decode(tuple[float, ...], progress.get("gradient_noise", ()))
        except (KeyError, TypeError, ValueError, ArtefactError) as failure:
            raise CheckpointError(f"its progress is damaged ({type(failure).__name__}: {failure})") from None
        check_order(progress, trial.position, run.settings, run.parts.train_set.length)
        check_end(state.step, trial.position, run.settings)
        if trial.position.sample:
            check_same_order(progress, run.parts.train_set.dataset, run.settings)
        self.engine.load(state)
        if trial.best and not checkpoints.has(run.folder.checkpoints, trial.best.get("step")):
            trial.best = None
        run.trial = trial
        run.noise.load(noise)
        saved = [source for source in self._sources if isinstance(source, SavedSource)]
        for source, own in zip(saved, policies):
            source.load(own)
        # A run that had no loss scale begins with a fresh one.
        if loss_scale and run.parts.scaler.is_enabled():
            run.parts.scaler.load_state_dict(loss_scale)

    def _agree_on_start(self) -> None:
        """All workers start from rank 0's state, also where their folders are not shared."""
        worker = self.run.worker
        if worker.world_size == 1:
            return
        found = all_gather_values([self.run.trial.step, self.run.trial.owes_evaluation])
        if any(each != found[0] for each in found):
            own = self._checkpoint(self.engine.start_state()) if worker.rank == 0 else None
            state = checkpoints.broadcast(own)
            if worker.rank != 0:
                self._load_checkpoint(state)
        if self.run.parts.pieces is None:
            self.run.broadcast_weights()
