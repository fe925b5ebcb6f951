"""The audit of trials in stages: the first worker of a group repeats a step of one with the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from plait.data.loader import Batch
from plait.data.seeding import mix
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.microbatches import microbatch_count
from plait.pipeline.transfers import pack_tree, unpack_tree
from plait.sweeping.engines.array_stages import FusedStages
from plait.sweeping.engines.audited_step import AuditedTrial
from plait.training.checkpoint import EngineState
from plait.training.components import TrialInit
from plait.training.components import build as build_components
from plait.training.trial import Trial
from plait.training.worker_group import ALONE, WorkerGroup
from plait.verification.observe import unchanged_random_numbers

# What was found: the seconds that it took, the largest difference, and differences in words.
Found = tuple[float, float, list[str]]


class AuditedStageTrial:
    """An audited step of the trial in `slot`: all workers create it before the step and end it afterwards.

    It takes the step on one worker with as many microbatches. Running statistics of stages with replicas,
    which see only some of them, are not compared. `on_found` is called on all workers, on the first one with
    what it found, unless there is nothing to compare.
    """

    def __init__(
        self,
        stages: FusedStages,
        pipeline: PipelineExecutor,
        group: WorkerGroup,
        slot: int,
        trial: Trial,
        on_found: Callable[[list[Found]], None],
        warn: Callable[[str], None],
    ) -> None:
        started = time.perf_counter()
        self._stages, self._pipeline, self._group = stages, pipeline, group
        self._slot, self._settings, self._on_found, self._warn = slot, trial.settings, on_found, warn
        self._before = stages.state(slot, pipeline, group)
        self._factor, self._usual = trial.lr_factor(trial.step), trial.batch.size
        self._seconds = time.perf_counter() - started

    def end(self, losses: Tensor) -> None:
        started = time.perf_counter()
        after, batch = self._stages.state(self._slot, self._pipeline, self._group), self._gather_batch()
        found: list[Found] = []
        if self._before is not None and after is not None:
            found = self._compare(self._before, batch, losses[self._slot], after)
        passed_s = self._seconds + time.perf_counter() - started
        self._on_found([(passed_s, largest, texts) for _, largest, texts in found])

    def _compare(self, before: EngineState, batch: Batch, loss: Tensor, after: EngineState) -> list[Found]:
        try:
            audited = self._audited(before, batch)
            largest, differences = audited.compare(loss, after)
        except torch.OutOfMemoryError:
            self._warn(
                "audit: there is no memory for a trial alone: the steps of these trials are not audited"
            )
            return []
        if audited.uses_python_state:
            self._warn(
                "audit: the steps of fused trials whose forward keeps numbers in Python are not audited"
            )
            return []
        return [(audited.seconds, largest, [str(each) for each in differences[:3]])]

    def _audited(self, before: EngineState, batch: Batch) -> AuditedTrial:
        """The trial alone, on this worker, as it was before the step."""
        stages = self._stages
        accumulate = microbatch_count(batch.total, self._usual, stages.layout.microbatches)
        settings = replace(self._settings, pipeline=None, accumulate=accumulate)
        known = stages.components.of_trial(self._slot)
        with unchanged_random_numbers():
            components = build_components(settings, known.device, (known.train_set, known.test_set))
        components.load(before)
        components.scaler.load_state_dict(dict(before.loss_scale))
        stream = mix(settings.seed), before.age, stages.verdict.unfused
        entry = TrialInit(settings, components, before.age)
        return AuditedTrial(entry, stream, batch, self._factor, ALONE, stages.unlike_buffers)

    def _gather_batch(self) -> Batch:
        """The trial's batch, whole on the first worker; it was read by the workers of the first stage."""
        batch, reader = self._stages.batches[self._slot], self._stages.layout.holders(0)[0]
        if reader == self._group.first_rank:
            return batch
        leaves, form = pack_tree(batch.content if self._group.rank == reader else ())
        named = {str(number): leaf for number, leaf in enumerate(leaves) if leaf is not None}
        gathered = self._group.gather(named)
        place = self._group.ranks.index(reader)
        count, form = self._group.of_all((len(leaves), form))[place]
        if not self._group.is_first:
            return batch
        return replace(batch, content=unpack_tree([gathered.get(str(i)) for i in range(count)], form))
