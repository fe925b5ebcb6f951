"""The trainer: one worker's part of a data-parallel run.

N workers on a global batch take the same steps as one process on it. Each works on its share, weights its
loss by that share's size, and gradients are summed. BatchNorm uses the statistics of each worker's share, as
in DistributedDataParallel; its running statistics are averaged over the workers before every evaluation and
checkpoint.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.cluster.worker import Worker
from plait.core.errors import CheckpointError
from plait.runtime import checkpoint as checkpoints
from plait.runtime import loading
from plait.runtime.build import Parts
from plait.runtime.evaluate import evaluate, forward
from plait.runtime.folder import RunFolder
from plait.runtime.record import Recorder
from plait.runtime.sampling import Position, batches, mix
from plait.runtime.settings import TrainSettings
from plait.sync.all_reduce import AllReduce


class Trainer:
    """Trains `parts` on this worker from where the last good checkpoint left off."""

    def __init__(self, worker: Worker, settings: TrainSettings, parts: Parts, folder: RunFolder) -> None:
        self.worker = worker
        self.settings = settings
        self.parts = parts
        self.folder = folder
        self.step = 0
        self.position = Position()
        self.best: dict[str, Any] | None = None
        self.evaluations_without_gain = 0
        self.early_best: float | None = None
        self._notes = torch.zeros(2, dtype=torch.float64)
        self._stop_before = False
        self._sync = AllReduce(list(parts.model.parameters())) if worker.world_size > 1 else None
        self._recorder = Recorder(worker, settings, parts, folder)

    def run(self, resume: bool) -> dict[str, Any]:
        """Train to the end or until asked to stop; what the run came to. All ranks call it together."""
        if resume:
            self._restore()
        self._agree_on_start()
        self._recorder.start(self.step)
        reason = self._train()
        metrics = self._finish(reason)
        return self._recorder.end(self.step, reason, metrics, self.best)

    def _train(self) -> str:
        settings = self.settings
        for batch in itertools.islice(self._batches(), max(self.parts.steps - self.step, 0)):
            loss, stop = self._one_step(batch)
            self.step += 1
            self.position = batch.after
            lr = self.parts.optimizer.param_groups[0]["lr"]
            self._recorder.step(self.step, batch.epoch, loss, lr, batch.total)
            last = self.step == self.parts.steps
            every = settings.evaluate.every_steps
            if every and self.step % every == 0 and not last and self._evaluate_and_judge():
                return "early-stop"
            if stop and not last:
                return "stopped"
            if self.step % settings.checkpoint.every_steps == 0 and not last:
                self._save()
        return "finished"

    def _finish(self, reason: str) -> dict[str, float]:
        metrics = self._evaluate() if reason != "stopped" else {}
        self._save(metrics)
        return metrics

    def _batches(self) -> Iterator[loading.Batch]:
        data, parts = self.settings.data, self.parts
        order = batches(
            self.position,
            len(parts.train_set),
            data.batch_size,
            seed=self.settings.seed,
            shuffle=data.shuffle,
            keep_last=data.last_batch == "keep",
        )
        return loading.load(
            parts.train_set,
            order,
            seed=self.settings.seed,
            rank=self.worker.rank,
            world_size=self.worker.world_size,
            loaders=data.loaders,
        )

    def _one_step(self, batch: loading.Batch) -> tuple[Tensor, bool]:
        """Forward, backward, agree, update; the global batch's mean loss, and whether anyone wants to end."""
        parts = self.parts
        # Random numbers depend on the seed, the step and the rank alone, so a resumed run draws the same.
        torch.manual_seed(mix(self.settings.seed, self.step, self.worker.rank))
        self._set_lr()
        if self._sync is not None:
            self._sync.begin()
        else:
            parts.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(batch)
        stop = self._stop_before
        if self._sync is None:
            self._stop_before = self.worker.stop_requested()
        else:
            # The wish to stop is read one step later, when the sum has long arrived: no device waits for it.
            stop = bool(self._notes[1] > 0)
            wish = torch.full_like(loss, float(self.worker.stop_requested()))
            self._notes = self._sync.agree(torch.stack([loss, wish]))
            loss = self._notes[0]
        self._update()
        return loss, stop

    def _backward(self, batch: loading.Batch) -> Tensor:
        parts = self.parts
        total = torch.zeros((), dtype=torch.float64, device=parts.device)
        pieces = (
            list(loading.cut(batch.content, batch.count, self.settings.accumulate)) if batch.count else []
        )
        for i, (content, count) in enumerate(pieces):
            inputs, target = loading.to_device(content, parts.device, parts.dtype)
            with parts.autocast():
                loss = parts.loss(forward(parts.model, inputs), target)
            weighted = loss * (count / batch.total)
            if self._sync is not None:
                self._sync.before_backward(last=i == len(pieces) - 1)
            parts.scaler.scale(weighted).backward()
            total += weighted.detach()
        return total

    def _update(self) -> None:
        parts = self.parts
        if self.settings.clip_norm is not None:
            parts.scaler.unscale_(parts.optimizer)
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), self.settings.clip_norm)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()

    def _set_lr(self) -> None:
        factor = self.parts.lr_factor(self.step)
        for group, base in zip(self.parts.optimizer.param_groups, self.parts.base_lrs):
            group["lr"] = base * factor

    def _average_buffers(self) -> None:
        """Give all workers the mean of their running statistics."""
        if self.worker.world_size > 1:
            for buffer in self.parts.model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= self.worker.world_size

    def _evaluate(self) -> dict[str, float]:
        parts, settings = self.parts, self.settings
        if parts.test_set is None:
            return {}
        self._average_buffers()
        started = time.perf_counter()
        metrics = evaluate(
            parts.model,
            parts.loss,
            parts.metric,
            parts.test_set,
            batch_size=settings.evaluate.batch_size or settings.data.batch_size,
            rank=self.worker.rank,
            world_size=self.worker.world_size,
            device=parts.device,
            dtype=parts.dtype,
            autocast=parts.autocast,
        )
        self._recorder.evaluated(self.step, metrics, len(parts.test_set), time.perf_counter() - started)
        return metrics

    def _evaluate_and_judge(self) -> bool:
        """Evaluate, keep the best, and say whether patience is at its end."""
        metrics = self._evaluate()
        best = self.settings.checkpoint.keep_best
        if best is not None and metrics and _is_better(best, metrics, self.best):
            self._save(metrics)
        rule = self.settings.early_stop
        if rule is None or not metrics:
            return False
        value = metrics[rule.metric]
        sign = 1.0 if rule.metric == "loss" else -1.0
        if self.early_best is None or sign * (self.early_best - value) > rule.min_change:
            self.early_best, self.evaluations_without_gain = value, 0
        else:
            self.evaluations_without_gain += 1
        return self.evaluations_without_gain >= rule.patience

    def _save(self, metrics: dict[str, float] | None = None) -> None:
        """Rank 0 writes a checkpoint of the state after this step; the others wait at the next sum."""
        rule = self.settings.checkpoint
        is_best = bool(rule.keep_best and metrics and _is_better(rule.keep_best, metrics, self.best))
        if is_best:
            assert metrics is not None
            self.best = {"step": self.step, **metrics}
        self._average_buffers()
        if self.worker.rank != 0:
            return
        started = time.perf_counter()
        checkpoints.save(self.folder.checkpoints, self._state())
        checkpoints.prune(self.folder.checkpoints, rule.keep_last, self.best["step"] if self.best else None)
        self._recorder.saved(self.step, time.perf_counter() - started, is_best)

    def _state(self) -> checkpoints.Checkpoint:
        parts = self.parts
        progress = {
            "position": asdict(self.position),
            "seed": self.settings.seed,
            "best": self.best,
            "early_best": self.early_best,
            "evaluations_without_gain": self.evaluations_without_gain,
            "loss_scale": parts.scaler.state_dict(),
            "workers": self.worker.world_size,
        }
        return checkpoints.Checkpoint(
            self.step,
            checkpoints.model_state(parts.model),
            checkpoints.optimizer_state(parts.optimizer, parts.names),
            progress,
        )

    def _restore(self) -> None:
        """Take up the newest checkpoint that is whole and of this model; tell of those that are not."""
        refused = []
        for path in checkpoints.list_checkpoints(self.folder.checkpoints):
            try:
                self._take_up(checkpoints.load(path))
            except CheckpointError as failure:
                refused.append(str(failure))
                self._recorder.refused(path, str(failure))
                continue
            return
        if refused:
            raise CheckpointError(
                f"no checkpoint below {self.folder.checkpoints} can be used; the newest: {refused[0]}"
            )

    def _take_up(self, state: checkpoints.Checkpoint) -> None:
        parts = self.parts
        checkpoints.load_model_state(parts.model, state.model)
        checkpoints.load_optimizer_state(parts.optimizer, parts.names, state.optimizer)
        progress = state.progress
        self.step = state.step
        self.position = Position(**progress["position"])
        self.best = progress["best"]
        self.early_best = progress["early_best"]
        self.evaluations_without_gain = progress["evaluations_without_gain"]
        parts.scaler.load_state_dict(progress["loss_scale"])

    def _agree_on_start(self) -> None:
        """All workers start from rank 0's state, also where their folders are not shared."""
        if self.worker.world_size == 1:
            return
        header: list[Any] = [self._state() if self.worker.rank == 0 else None]
        steps: list[Any] = [None] * self.worker.world_size
        dist.all_gather_object(steps, self.step)
        if len(set(steps)) > 1:
            dist.broadcast_object_list(header, src=0, device=self.parts.device)
            if self.worker.rank != 0:
                self._take_up(header[0])
        with torch.no_grad():
            for tensor in itertools.chain(self.parts.model.parameters(), self.parts.model.buffers()):
                dist.broadcast(tensor, src=0)


def _is_better(name: str, metrics: dict[str, float], best: dict[str, Any] | None) -> bool:
    """Whether `metrics` beat the best so far by the metric `name`: smaller for a loss, larger for others."""
    if best is None:
        return True
    value, before = metrics[name], float(best[name])
    return value < before if name == "loss" else value > before
