"""The checkpoints of a run: what is written and kept, and which one a resumed run continues from."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.codec import decode, encode
from plait.core.errors import CheckpointError, JobError
from plait.core.shown import listed
from plait.data.requirements import check_continues, check_same_data, data_progress
from plait.data.sampler import Position
from plait.schema.settings import SyncSettings, TrainSettings
from plait.schema.topology import TopologyError
from plait.schema.topology_spec import AUTO, TopologySpec, build_topology
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.checks.unsaved_model import UnsavedState
from plait.training.engine import Engine
from plait.training.run import Run
from plait.training.trial import gain, reading_progress

log = logging.getLogger(__name__)
# The engine of a run that goes on with a sync.
EngineOf = Callable[[SyncSettings], Engine]


class RunCheckpoints:
    """Writes the checkpoints of a run, and loads them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # The step of the last checkpoint that this worker wrote, and of the last that it refused to write.
        self._saved_step: int | None = None
        self._broken_step: int | None = None
        self._warned_of_unsaved = False
        self._unsaved: UnsavedState | None = None

    def begin(self) -> None:
        """Remember the model's state that no checkpoint holds; called before the first step."""
        components = self._run.components
        self._unsaved = UnsavedState(components.model) if components.local_tensors is None else None

    def keep_evaluation(self, metrics: dict[str, float]) -> None:
        """Add the metrics to the checkpoint of this step, on the worker that wrote it."""
        run, folder, started = self._run, self._run.folder.checkpoints, time.perf_counter()
        run.trial.owes_evaluation, is_best = False, self._is_best(metrics)
        if is_best:
            run.trial.best = {"step": run.trial.step, **metrics}
        if self._saved_step != run.trial.step:
            return
        checkpoints.update_progress(folder, run.trial.step, self._progress())
        if is_best:
            checkpoints.point_to_best(folder, run.trial.step)
            self._prune()
            run.metrics.saved(run.trial.step, time.perf_counter() - started, is_best)

    def _is_best(self, metrics: dict[str, float]) -> bool:
        name, best = self._run.settings.checkpoint.keep_best, self._run.trial.best
        if name is None or not metrics or self._broken_step == self._run.trial.step:
            return False
        if not math.isfinite(metrics[name]):
            return False
        return best is None or gain(self._run.components.modes[name], metrics[name], best[name]) > 0

    def save(self, state: EngineState | None) -> str | None:
        """Write a checkpoint of this step on the worker that has the `state`; the others continue.

        Returns why no checkpoint was written, if the state must not replace earlier ones.
        """
        run, started = self._run, time.perf_counter()
        self._warn_of_unsaved()
        if state is None:
            return None
        if (broken := self._find_broken(state)) is not None:
            run.metrics.warn(f"no checkpoint of step {run.trial.step}: {broken}; earlier ones stay")
            state.discard()
            self._broken_step = run.trial.step
            return broken
        if state.unsaved and not self._warned_of_unsaved:
            self._warned_of_unsaved = True
            run.metrics.warn(
                f"optimizer: {run.settings.optimizer.kind} keeps {', '.join(state.unsaved)}, which no "
                f"checkpoint holds (expected tensors and numbers): a resumed run begins without it"
            )
        checkpoints.save(run.folder.checkpoints, self.of(state))
        state.discard()
        self._saved_step = run.trial.step
        self._prune()
        run.metrics.saved(run.trial.step, time.perf_counter() - started, best=False)
        return None

    def _warn_of_unsaved(self) -> None:
        """Warn once of model state that is in no checkpoint; each worker checks its stages."""
        if self._unsaved is None or not (names := self._unsaved.changed()):
            return
        self._unsaved = None
        message = (
            f"model: {listed(names)} of {self._run.settings.model.factory} changed while it trained, and no "
            f"checkpoint holds it: a resumed run begins without it; keep it in a persistent buffer, or give "
            f"it out by get_extra_state and take it back by set_extra_state"
        )
        if self._run.settings.pipeline is None:
            self._run.metrics.warn(message)
        else:
            log.warning("%s", message)

    def _prune(self) -> None:
        best, folder = self._run.trial.best, self._run.folder.checkpoints
        kept = best["step"] if best else None
        checkpoints.prune(folder, self._run.trial.step, self._run.settings.checkpoint.keep_last, kept)

    def _find_broken(self, state: EngineState) -> str | None:
        """Why a state must not replace earlier checkpoints; None if it may."""
        run = self._run
        if run.settings.stop_on_nan and not run.metrics.is_loss_finite:
            return "its loss is not a number"
        name = state.find_broken(run.components.weights)
        return None if name is None else f"{name!r} holds values that are no numbers"

    def of(self, state: EngineState) -> Checkpoint:
        run = self._run
        return Checkpoint(
            run.trial.step, state.model, state.optimizer, self._progress(), state.sync, state.written
        )

    def _progress(self) -> dict[str, Any]:
        """The progress of the run that a checkpoint stores besides tensors."""
        run = self._run
        return {
            **run.trial.progress(run.components.scaler.state_dict(), run.worker.world_size),
            "sync": encode(run.settings.sync),
            "job_sync": encode(run.job_sync),
            "topology": encode(run.settings.topology),
            "job_topology": encode(run.job_topology),
            **data_progress(run.components.train_set, run.settings),
        }

    def restore(self, engine_of: EngineOf) -> Checkpoint | None:
        """Load the newest checkpoint that is complete and fits this model; record those that are refused."""
        run, refused, loaded = self._run, list[str](), list[Checkpoint]()

        def refuse(path: Path, why: str) -> None:
            refused.append(why)
            run.metrics.refused(path, why)

        def use(path: Path) -> bool:
            state = read(path)
            self.load(engine_of, state)
            loaded.append(state)
            return True

        folder = run.folder.checkpoints
        read = checkpoints.load if run.components.local_tensors is None else checkpoints.load_lazily
        if checkpoints.newest(folder, use, refuse):
            return loaded[0]
        if refused:
            raise CheckpointError(f"no checkpoint below {folder} can be used; the newest: {refused[0]}")
        run.metrics.warn(f"no checkpoint below {folder}; starting from the first step")
        return None

    def load(self, engine_of: EngineOf, state: Checkpoint) -> None:
        """Continue from a checkpoint; CheckpointError changes nothing but sync and topology."""
        run, progress = self._run, state.progress
        checkpoints.check_optimizer(progress, run.settings.optimizer.kind)
        check_same_data(progress, run.components.train_set.dataset, run.settings.data)
        with reading_progress():
            self._keep_topology(progress)
            # That of the checkpoint, unless the job file has changed.
            is_kept = progress.get("job_sync") == encode(run.job_sync)
            engine = engine_of(decode(SyncSettings, progress["sync"]) if is_kept else run.job_sync)
        trial = replace(run.trial, early_stopping=replace(run.trial.early_stopping))
        trial.load(state.step, progress)
        with reading_progress():
            loss_scale = progress["loss_scale"]
        check_continues(progress, trial.position.sample > 0, run.components.train_set, run.settings)
        _check_end(state.step, trial.position, run.settings)
        engine.load(state)
        if trial.best and not checkpoints.has(run.folder.checkpoints, trial.best.get("step")):
            trial.best = None
        run.trial = trial
        trial.load_signals(progress)
        # A run that had no loss scale starts with a new one.
        if loss_scale and run.components.scaler.is_enabled():
            run.components.scaler.load_state_dict(loss_scale)

    def _keep_topology(self, progress: Mapping[str, Any]) -> None:
        """Go on with the topology of the checkpoint, unless the job file has changed.

        One that may have been measured is kept for as many workers, and that of a function which a policy has
        chosen if it returns graphs for these.
        """
        run, job = self._run, self._run.job_topology
        is_same = progress.get("job_topology") == encode(job)
        if is_same and (job.name != AUTO or progress["workers"] == run.worker.world_size):
            kept = decode(TopologySpec, progress["topology"])
            try:
                if kept != job and kept.is_function:
                    build_topology(kept, run.worker.hosts)
            except TopologyError as failure:
                run.metrics.warn(f"{failure}; the run goes on over {job.name}, as the job has it")
            else:
                run.settings = replace(run.settings, topology=kept)


def _check_end(step: int, position: Position, settings: TrainSettings) -> None:
    """Refuse to resume a run that is already beyond its end."""
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
