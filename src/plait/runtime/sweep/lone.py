"""An array of one trial that is trained as `plait train` would: what fusion cannot take, or one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.runtime import checkpoint as checkpoints
from plait.runtime.data_parallel import DataParallel
from plait.runtime.evaluate import evaluate_parts
from plait.runtime.loading import Batch, seed_all
from plait.runtime.sampling import mix
from plait.runtime.sweep.array import Entry, TrialTensors


@dataclass(frozen=True)
class _Alone:
    """A worker without others, as the engine of a run sees it."""

    rank: int = 0
    world_size: int = 1

    def stop_requested(self) -> bool:
        return False


class LoneArray:
    """One trial with its own model and torch's optimizer."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._take(entries)

    def _take(self, entries: Sequence[Entry]) -> None:
        assert len(entries) == 1
        (self._entry,) = entries
        self._age = self._entry.age
        self._engine = DataParallel(_Alone(), self._entry.settings, self._entry.parts)  # type: ignore[arg-type]

    @property
    def trials(self) -> int:
        return 1

    def change(self, leaving: Sequence[int], entering: Sequence[Entry]) -> None:
        """Let the trial leave and another take its place."""
        if entering:
            self._take(entering)

    def step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step on its batch, with a factor on the learning rate; its loss."""
        seed_all(mix(self._entry.settings.seed, self._age, 0))
        self._age += 1
        loss, _ = self._engine.step(batches[0], factors[0])
        return loss.unsqueeze(0)

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]:
        return [evaluate_parts(self._entry.parts, self._entry.settings, 0, 1) for _ in places]

    def tensors(self, place: int) -> TrialTensors:
        parts = self._entry.parts
        return TrialTensors(
            checkpoints.model_state(parts.model),
            checkpoints.optimizer_state(parts.optimizer, parts.names),
            parts.scaler.state_dict(),
            self._age,
        )
