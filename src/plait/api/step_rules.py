"""What happens in and between the steps of a loop besides training."""

from __future__ import annotations

from collections.abc import Sequence


class StepRules:
    """What a `DataParallel` asks in its steps, and a `DataLoader` between two batches.

    Nothing happens here; `plait.Elastic` has other rules.
    """

    # Whether `DataParallel` must be able to restore the buffers from before a step.
    keeps_buffers = False
    # Whether workers compare their loaders before each epoch.
    compares_loaders = True
    # Whether the last change has moved the position behind the last batch of the loop.
    is_at_end = False

    def flags(self) -> Sequence[float]:
        """Numbers that are summed over the workers together with the gradients."""
        return ()

    def are_gradients_kept(self, flags: Sequence[float]) -> bool:
        """Called with the sums of `flags` in each backward pass; False discards the gradients."""
        return True

    def lose(self, failure: RuntimeError) -> bool:
        """Whether `failure` says that a worker is lost; if so, the loop goes on: gradients are discarded."""
        return False

    def change_if_due(self, at_end: bool) -> bool:
        """Apply a change of workers between two steps; returns whether data is read again from its position.

        `at_end` says that the epoch has no further batch, unless the last one is given again.
        """
        return False

    def begin(self) -> None:
        """Called before a batch is given, with the position before it."""
