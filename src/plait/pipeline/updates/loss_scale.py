"""Loss scaling of a pipeline in fp16: all stages share one scale and skip the same updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class LossScaling(Protocol):
    """The loss scales on one worker of a pipeline: one number, or one for each of fused trials."""

    @property
    def value(self) -> float | Tensor: ...

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, everyone: dist.ProcessGroup | None = None
    ) -> bool:
        """Divide gradients by the scale, then update it; returns whether the update is made.

        All workers, those of the process group `everyone`, call it together, once per update.
        """


class LossScale:
    """The loss scale on one worker of a pipeline; it keeps small gradients representable in fp16.

    Growth, backoff and state are those of `scaler`, which checkpoints store. If gradients overflow in any
    stage, all stages skip the update.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self.value: float = scaler.get_scale()
        self._good_updates = int(scaler.state_dict().get("_growth_tracker", 0))

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, everyone: dist.ProcessGroup | None = None
    ) -> bool:
        """See `LossScaling`; no stage is updated unless gradients are finite in all of them."""
        overflow = torch.zeros(1, device=device)
        if grads:
            inverse = torch.full((1,), 1.0 / self.value, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(list(grads), overflow, inverse)
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=everyone)
        is_finite = not bool(overflow.item())
        self._change(is_finite)
        return is_finite

    def _change(self, is_finite: bool) -> None:
        scaler = self._scaler
        self._good_updates = self._good_updates + 1 if is_finite else 0
        if not is_finite:
            self.value *= scaler.get_backoff_factor()
        elif self._good_updates == scaler.get_growth_interval():
            self.value *= scaler.get_growth_factor()
            self._good_updates = 0
        state = {**scaler.state_dict(), "scale": self.value, "_growth_tracker": self._good_updates}
        scaler.load_state_dict(state)
