"""Whether a run has diverged: its loss, or what a checkpoint would hold, is not a number."""

from __future__ import annotations

import math
from collections.abc import Callable

from plait.schema.settings import TrainSettings


class DivergenceCheck:
    """Warns of a loss that is not finite; with `stop_on_nan` the run ends: `stop` is called, once."""

    def __init__(
        self, settings: TrainSettings, warn: Callable[[str], None], stop: Callable[[], None]
    ) -> None:
        self._ends = settings.stop_on_nan
        # The loss scaler skips a step whose fp16 gradients overflow; the next steps are fine.
        self._allowed = 1 if settings.precision == "fp16" else 0
        self._warn = warn
        self._stop = stop
        # Why the run ends as diverged.
        self.why: str | None = None
        self._bad_losses = 0
        self._has_warned = False

    def check_loss(self, step: int, mean: float, last: float) -> None:
        """Judge the mean of the losses that were recorded after `step`, and the last of them."""
        self._bad_losses = 0 if math.isfinite(last) else self._bad_losses + 1
        if not math.isfinite(mean) and not self._has_warned:
            self._has_warned = True
            self._warn(f"the loss is {mean} at step {step}; try a smaller learning rate, or clip_norm")
        if self._bad_losses > self._allowed:
            self.end(step, "the loss is not a number")

    def end(self, step: int, why: str) -> None:
        """Ask the run to stop because of `why`; nothing if it may go on, or was asked before."""
        if self._ends and self.why is None:
            self.why = f"{why} at step {step}"
            self._stop()
