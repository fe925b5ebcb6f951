"""All workers of a pipeline write a step's update, or none does, also where one is lost in between."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.pipeline.executor import Pipeline


class StepCommit:
    """Has the workers of a pipeline that drains wait for each other before each update.

    Whoever goes on knows that all have the gradients of the whole batch. So where one has written an update
    and another was lost meanwhile, the rest can write it still. Otherwise nobody has: all go back to before
    the step, and take it again.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._buffers = [b for module in pipeline.modules.values() for b in module.buffers()]
        self._kept: list[torch.Tensor] = []
        # Steps of the interval whose updates are written, and whether that of the next one can be.
        self.written = 0
        self.is_ready = False
        self.optimizer = pipeline.optimizer
        pipeline.before_update, pipeline.after_update = self._wait_for_all, self._note_written

    def begin_interval(self) -> None:
        self.written, self.is_ready = 0, False
        self._keep_buffers()

    def end_interval(self) -> None:
        """All steps are written: nothing is left to undo."""
        self._kept = []

    def _wait_for_all(self) -> None:
        self.is_ready = True
        dist.all_reduce(torch.zeros(1))

    def _note_written(self) -> None:
        self.written, self.is_ready = self.written + 1, False
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    def keep_gradients(self) -> None:
        """Hold what an update needs after the pipeline is closed; called once a worker is lost."""
        for parameter in self._pipeline.parameters.values():
            if self.is_ready and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def finish(self, write: bool) -> None:
        """Write the update that this worker was about to write, or go back to before the step."""
        if write:
            self.optimizer.step()
        else:
            with torch.no_grad():
                for buffer, before in zip(self._buffers, self._kept):
                    buffer.copy_(before)
        for parameter in self._pipeline.parameters.values():
            parameter.grad = None
        self.is_ready = False
