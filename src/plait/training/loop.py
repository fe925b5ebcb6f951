"""The trainer: the loop around steps, with evaluation, checkpoints, early stop and the record of it all."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.collectives import all_gather_values
from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError, JobError
from plait.data import loader
from plait.data.sampler import ENDLESS, GlobalBatch, Position, batches, mix
from plait.data.streams import StreamOrder, check_same_stream, has_state, stream_batches
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training.components import UNKNOWN_STEPS, Components, emulated, total_steps
from plait.training.early_stopping import EarlyStopping, gain
from plait.training.engines.data_parallel import DataParallel
from plait.training.evaluate import evaluate_parts
from plait.training.loss_parts import describe_parts
from plait.training.metrics import MetricsLogger
from plait.training.optim import build_lr_factor


def keep_what_was_built() -> None:
    """Let garbage collections pass over what is there now: while it trains, each would stop a step."""
    gc.collect()
    gc.freeze()


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


class Trainer:
    """Trains `parts` on this worker from where the last good checkpoint left off."""

    def __init__(self, worker: Worker, settings: TrainSettings, parts: Components, folder: RunDir) -> None:
        self.worker = worker
        self.settings = settings
        self.parts = parts
        self.folder = folder
        self.step = self.steps = 0
        self.position = Position()
        self.best: dict[str, Any] | None = None
        self.patience = EarlyStopping(settings.early_stop)
        self.engine = self._make_engine()
        self.recorder = MetricsLogger(worker, settings, parts, folder)

    def _make_engine(self) -> DataParallel | None:
        return DataParallel(self.worker, self.settings, self.parts)

    def _average_buffers(self) -> None:
        assert self.engine is not None
        self.engine.average_buffers()

    def run(self, resume: bool) -> dict[str, Any]:
        """Train to the end or until asked to stop; what the run came to. All ranks call it together."""
        if resume:
            self._restore()
        self._agree_on_start()
        # Counted from the position: the batch size may have changed since the steps before were taken.
        self.begin(total_steps(self.settings, self.parts.train_set.length, self.step, self.position))
        if self.parts.train_set.is_stream:
            self._warn_of_skipping()
        keep_what_was_built()
        reason = self.train()
        self.recorder.log_rest()
        # Only who keeps the record knows of a divergence; the others do what they do when asked to stop.
        metrics = self._evaluate() if reason != "stopped" else {}
        self._save_last(metrics)
        if self.engine is not None:
            self.engine.close()
        if self.recorder.diverged_at is not None:
            reason = "diverged"
        return self.recorder.end(self.step, reason, metrics, self.best)

    def begin(self, steps: int) -> None:
        """Get ready to go on until `steps` steps are done."""
        self.steps = steps
        self._lr_factor = build_lr_factor(self.settings.lr_schedule, steps)
        self._tell_of_parts()
        self.recorder.start(self.step, None if steps == UNKNOWN_STEPS else steps)
        if slow := emulated(self.settings.precision, self.parts.device):
            self.recorder.warn(slow)
        if self.engine is not None and self.engine.chosen is not None:
            self.recorder.note(self.engine.chosen)

    def _tell_of_parts(self) -> None:
        """Warn where a batch that is trained in parts has another loss than as a whole."""
        asked = self.worker.rank == 0 and self.settings.verify != "off"
        if asked and self._parts_of_a_batch() > 1 and (words := describe_parts(self.settings, self.parts)):
            self.recorder.warn(words)

    def _parts_of_a_batch(self) -> int:
        """In how many parts, each with a loss of its own, a batch is trained."""
        return self.worker.world_size * self.settings.accumulate

    def train(self) -> str:
        """Take steps until the last one, a request to stop, or the end of patience; which of them it was."""
        assert self.engine is not None
        if self.patience.is_over():
            return "early-stop"
        for batch in itertools.islice(self._batches(), self._steps_left()):
            # Random numbers depend on the seed, the step and the rank alone: a resumed run draws the same.
            loader.seed_all(mix(self.settings.seed, self.step, self.worker.rank))
            factor = self._lr_factor(self.step)
            loss, stop = self.engine.step(batch, factor)
            self.step += 1
            self.position = batch.after
            self.recorder.step(self.step, batch.epoch, loss, self.parts.base_lrs[0] * factor, batch.total)
            if batch.last or self._steps_left() == 0:
                break
            self._evaluate_or_save()
            if self.patience.is_over():
                return "early-stop"
            if stop:
                return "stopped"
        if self._steps_left() is None:
            self.steps = self.step
            self.recorder.set_steps(self.step)
        return "finished"

    def _steps_left(self) -> int | None:
        """How many steps are left; None for a run over epochs of a stream, which ends with the stream."""
        if self.parts.train_set.is_stream and self.settings.epochs is not None:
            return None
        return max(self.steps - self.step, 0)

    def _evaluate_or_save(self) -> None:
        """What is due after this step: an evaluation, and one checkpoint at most."""
        every = self.settings.evaluate.every_steps
        metrics = self._evaluate() if every and self.step % every == 0 else {}
        self.patience.judge(metrics)
        if self.step % self.settings.checkpoint.every_steps == 0 or self._is_best(metrics):
            self._save(metrics)

    def _order(self) -> Iterator[GlobalBatch]:
        """The batches to come, by their samples."""
        data, source = self.settings.data, self.parts.train_set
        return batches(
            self.position,
            ENDLESS if source.length is None else len(source),
            data.batch_size,
            seed=self.settings.seed,
            shuffle=data.shuffle and not source.is_stream,
            keep_last=data.last_batch == "keep",
        )

    def _batches(self) -> Iterator[loader.Batch]:
        data, parts = self.settings.data, self.parts
        if parts.train_set.is_stream:
            return self._stream()
        return loader.load(
            parts.train_set,
            self._order(),
            seed=self.settings.seed,
            rank=self.worker.rank,
            world_size=self.worker.world_size,
            loaders=data.loaders,
            pin=parts.device.type == "cuda",
        )

    def _warn_of_skipping(self) -> None:
        if self.position.sample and (self.position.stream is None or self.settings.pipeline is not None):
            self.recorder.warn(
                f"no state of the stream to continue from: {self.position.sample:,} samples of epoch "
                f"{self.position.epoch} are read again and skipped, which is exact if it gives the same "
                f"samples as before"
            )

    def _stream(self) -> Iterator[loader.Batch]:
        """This worker's shares of the batches of a stream, from the run's position on."""
        settings, data, parts = self.settings, self.settings.data, self.parts
        source, worker = parts.train_set, self.worker
        order = StreamOrder(
            self.position, data.batch_size, data.last_batch == "keep", settings.epochs, settings.seed
        )
        pin = parts.device.type == "cuda"
        batches = stream_batches(source, order, worker.rank, worker.world_size, data.loaders, pin)
        for number, batch in enumerate(batches):
            if number == 0 and worker.world_size > 1:
                check_same_stream(batch)
            if number == 0 and has_state(source.dataset) and batch.after.stream is None:
                self.recorder.warn(
                    "the stream's state_dict holds values that a checkpoint cannot keep (expected numbers, "
                    "text, None, lists, and dicts with text as keys); a resumed run will skip the samples "
                    "that were used"
                )
            yield batch

    def _evaluate(self) -> dict[str, float]:
        if self.parts.test_set is None:
            return {}
        self._average_buffers()
        started = time.perf_counter()
        metrics = self._measure()
        seconds = time.perf_counter() - started
        self.recorder.evaluated(self.step, metrics, self.parts.test_set.length or 0, seconds)
        return metrics

    def _measure(self) -> dict[str, float]:
        """Mean loss and metric over the test split, the same on all ranks."""
        return evaluate_parts(self.parts, self.settings, self.worker.rank, self.worker.world_size)

    def _is_best(self, metrics: dict[str, float]) -> bool:
        name = self.settings.checkpoint.keep_best
        if name is None or not metrics or not math.isfinite(metrics[name]):
            return False
        return self.best is None or gain(name, metrics[name], self.best[name]) > 0

    def _save(self, metrics: dict[str, float]) -> None:
        """Rank 0 writes a checkpoint of the state after this step; the others wait at the next sum."""
        is_best = self._is_best(metrics)
        if is_best:
            self.best = {"step": self.step, **metrics}
        started = time.perf_counter()
        self._gather_state()
        if not self._writes():
            return
        if self.settings.stop_on_nan and not self.recorder.is_loss_finite:
            self.recorder.warn(
                f"no checkpoint of step {self.step}, whose loss is no number: earlier ones stay"
            )
            return
        rule, folder = self.settings.checkpoint, self.folder.checkpoints
        checkpoints.save(folder, self._state())
        if is_best:
            checkpoints.point_to_best(folder, self.step)
        checkpoints.prune(folder, self.step, rule.keep_last, self.best["step"] if self.best else None)
        self.recorder.saved(self.step, time.perf_counter() - started, is_best)

    def _save_last(self, metrics: dict[str, float]) -> None:
        """Write the checkpoint of the run's end."""
        self._save(metrics)

    def _writes(self) -> bool:
        """Whether this worker is the one that writes checkpoints."""
        return self.worker.rank == 0

    def _gather_state(self) -> None:
        """Let whoever writes a checkpoint have all of it; all workers call it together."""
        self._average_buffers()

    def _state(self) -> checkpoints.Checkpoint:
        parts = self.parts
        progress = {
            "position": asdict(self.position),
            "seed": self.settings.seed,
            "shuffle": self.settings.data.shuffle,
            "samples": self.parts.train_set.length,
            "best": self.best,
            "early_best": self.patience.best,
            "evaluations_without_gain": self.patience.without_gain,
            "loss_scale": parts.scaler.state_dict(),
            "optimizer": self.settings.optimizer.kind,
            "workers": self.worker.world_size,
        }
        return checkpoints.Checkpoint(
            self.step,
            named_state.model_state(parts.model),
            named_state.optimizer_state(parts.optimizer, parts.names),
            progress,
        )

    def _restore(self) -> None:
        """Take up the newest checkpoint that is whole and of this model; tell of those that are not."""
        refused = []
        for path in checkpoints.list_checkpoints(self.folder.checkpoints):
            try:
                self._take_up_from(path)
            except CheckpointError as failure:
                refused.append(str(failure))
                self.recorder.refused(path, str(failure))
                continue
            return
        if not refused:
            self.recorder.warn(f"no checkpoint below {self.folder.checkpoints}; starting from the first step")
        if refused:
            raise CheckpointError(
                f"no checkpoint below {self.folder.checkpoints} can be used; the newest: {refused[0]}"
            )

    def _take_up_from(self, path: Path) -> None:
        self._take_up(checkpoints.load(path))

    def _take_up(self, state: checkpoints.Checkpoint) -> None:
        def load_tensors() -> None:
            checkpoints.load_model_state(self.parts.model, state.model)
            named_state.load_optimizer_state(self.parts.optimizer, self.parts.names, state.optimizer)

        self._take_up_progress(state.step, state.progress, load_tensors)

    def _take_up_progress(
        self, step: int, progress: Mapping[str, Any], load_tensors: Callable[[], None]
    ) -> None:
        """Go on after `step` steps; nothing has changed where the progress or the tensors are refused."""
        parts = self.parts
        checkpoints.check_optimizer(progress, self.settings.optimizer.kind)
        try:
            position = decode(Position, progress["position"])
            best, early_best = progress["best"], progress["early_best"]
            without_gain, loss_scale = int(progress["evaluations_without_gain"]), progress["loss_scale"]
        except (KeyError, TypeError, ValueError, ArtefactError) as failure:
            raise CheckpointError(f"its progress is damaged ({type(failure).__name__}: {failure})") from None
        check_order(progress, position, self.settings, parts.train_set.length)
        load_tensors()
        self.step, self.position = step, position
        self.best = best if best and checkpoints.has(self.folder.checkpoints, best.get("step")) else None
        self.patience.best, self.patience.without_gain = early_best, without_gain
        # A run that had no loss scale begins with a fresh one.
        if loss_scale and parts.scaler.is_enabled():
            parts.scaler.load_state_dict(loss_scale)

    def _agree_on_start(self) -> None:
        """All workers start from rank 0's state, also where their folders are not shared."""
        if self.worker.world_size == 1:
            return
        steps = all_gather_values(self.step)
        if len(set(steps)) > 1:
            state = checkpoints.broadcast(self._state() if self.worker.rank == 0 else None)
            if self.worker.rank != 0:
                self._take_up(state)
        with torch.no_grad():
            for tensor in itertools.chain(self.parts.model.parameters(), self.parts.model.buffers()):
                dist.broadcast(tensor, src=0)
