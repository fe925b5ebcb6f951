"""An array of one trial that is trained as `plait train` would: what fusion cannot take, or one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.data.loader import Batch, seed_all
from plait.data.sampler import mix
from plait.launch.membership import Memberships, fixed_memberships
from plait.pipeline import named_state
from plait.sweeping.engines.fused import TrialInit, TrialTensors
from plait.sweeping.worker_group import ALONE, GroupSum, WorkerGroup
from plait.training.engines.train_step import TrainStep
from plait.training.evaluate import means, sums_over_share


@dataclass(frozen=True)
class _Alone:
    """A worker without others, as the engine of a run sees it."""

    rank: int = 0
    world_size: int = 1
    memberships: Memberships = field(default_factory=lambda: fixed_memberships(0, ["localhost"]))

    def stop_requested(self) -> bool:
        return False


class UnfusedArray:
    """One trial with its own model and torch's optimizer, on this worker or on all of a worker group."""

    is_fused = False

    def __init__(self, entries: Sequence[TrialInit], workers: WorkerGroup = ALONE) -> None:
        self._workers = workers
        self._sum: GroupSum | None = None
        self._take(entries)

    def _take(self, entries: Sequence[TrialInit]) -> None:
        assert len(entries) == 1
        (self._entry,) = entries
        self._age = self._entry.age
        self._engine = TrainStep(_Alone(), self._entry.settings, self._entry.parts)  # type: ignore[arg-type]
        # Whether a step may have made the running statistics of the workers of a group differ.
        self._differs = False
        if not self._workers.is_alone:
            parameters = [p for p in self._entry.parts.model.parameters() if p.requires_grad]
            self._sum = GroupSum(self._workers, parameters, 1)
            self._engine.before_update = self._add_up

    @property
    def trials(self) -> int:
        return 1

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Any trial can take another's place."""

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        """Let the trial leave and another take its place."""
        if entering:
            self._take(entering)

    def step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step on its batch, with a factor on the learning rate; its loss."""
        seed_all(mix(self._entry.settings.seed, self._age, self._workers.share[0]))
        self._age += 1
        if self._sum is not None:
            self._sum.begin()
        loss, _ = self._engine.step(batches[0], factors[0])
        self._differs = True
        return self._workers.total(loss, loss.device).unsqueeze(0)

    def _add_up(self) -> None:
        """Make this worker's gradients those of the whole group."""
        assert self._sum is not None
        self._sum.agree(torch.zeros(1, dtype=torch.float64, device=self._entry.parts.device))

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric over the test split."""
        if not places:
            return []
        self.average()
        parts = self._entry.parts
        sums = sums_over_share(parts, self._entry.settings, *self._workers.share)
        return [means(parts, self._workers.total(sums, parts.device))]

    def average(self) -> None:
        """Give all workers of the group the mean of their running statistics, where they may differ."""
        if self._differs:
            self._workers.average(self._entry.parts.model)
            self._differs = False

    def close(self) -> None:
        """Let go of the trial."""
        if self._sum is not None:
            self._sum.close()

    def noise(self, place: int) -> GradientAverages | None:
        """Not measured: trials that are not fused take their steps one by one."""
        return None

    def tensors(self, place: int) -> TrialTensors:
        self.average()
        parts = self._entry.parts
        return TrialTensors(
            named_state.model_state(parts.model),
            named_state.optimizer_state(parts.optimizer, parts.names),
            parts.scaler.state_dict(),
            self._age,
        )
