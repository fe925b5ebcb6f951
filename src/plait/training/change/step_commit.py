"""Makes the update of a step atomic over the workers of a pipeline, even if one is lost during it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.pipeline.executor import PipelineExecutor


class StepCommit:
    """Lets the workers of a draining pipeline wait for each other before each update.

    A worker that passes this barrier knows that all have the gradients of the whole batch. So if one worker
    has applied an update and another was lost, the remaining workers can still apply it. If none has applied
    it, all undo the step and repeat it.
    """

    def __init__(self, pipeline: PipelineExecutor) -> None:
        self._pipeline = pipeline
        self._buffers = [b for module in pipeline.modules.values() for b in module.buffers()]
        self._kept: list[torch.Tensor] = []
        # Steps of the interval whose updates are applied, and whether the next update can be applied.
        self.written = 0
        self.is_ready = False
        self.optimizer = pipeline.optimizer
        pipeline.before_update, pipeline.after_update = self._wait_for_all, self._record_written

    def begin_interval(self) -> None:
        self.written, self.is_ready = 0, False
        self._keep_buffers()

    def end_interval(self) -> None:
        """All updates are applied: nothing is left to undo."""
        self._kept = []

    def _wait_for_all(self) -> None:
        self.is_ready = True
        dist.all_reduce(torch.zeros(1))

    def _record_written(self) -> None:
        self.written, self.is_ready = self.written + 1, False
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    def keep_gradients(self) -> None:
        """Copy the gradients, so that they outlive the pipeline; called when a worker is lost."""
        for parameter in self._pipeline.parameters.values():
            if self.is_ready and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def finish(self, write: bool) -> None:
        """Apply the pending update (`write`), or restore the state before the step."""
        if write:
            self.optimizer.step()
        else:
            with torch.no_grad():
                for buffer, before in zip(self._buffers, self._kept):
                    buffer.copy_(before)
        for parameter in self._pipeline.parameters.values():
            parameter.grad = None
        self.is_ready = False
