"""`DataParallel`: a copy of the model on each worker, with the gradient of the samples of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.api.same_model import check_same_model, copy_of_first
from plait.api.world import World, init
from plait.comm.collectives import broadcast_value
from plait.core.errors import InputError
from plait.schema.topology_spec import read_topology_spec
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.buckets import AllReduce

Samples = Callable[..., float]


def count_samples(*inputs: Any, **named: Any) -> float:
    """The length of the first tensor among the inputs of a forward, whose first axis is the batch."""
    for leaf in tree_leaves((inputs, named)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return float(len(leaf))
    return 1.0


class DataParallel(nn.Module):
    """Wraps a model that every worker has; after `backward` all have the gradient of the whole batch.

    It behaves as torch's DistributedDataParallel: the model of rank 0 is copied to all workers, gradients are
    summed in buckets while backward still runs, buffers are those of rank 0, and `no_sync` accumulates. In
    addition
    - batches may have unlike sizes: gradients are weighted by the number of samples of each worker, so that a
      loss that is a mean over the batch has the gradient of one worker with all samples. `samples` counts
      those of a forward; by default it is the length of the first tensor. `samples=lambda *_: 1` weighs all
      workers alike;
    - parameters may be without a gradient on some or all workers in some steps; nothing has to be declared;
    - `topology` is the graph that sums travel: `default`, `auto` (measured now), `ring`, `tree`, `star`, ...;
    - `state_dict` has the names of the plain model.

    All workers run the same number of backward passes.
    """

    def __init__(
        self,
        module: nn.Module,
        topology: str = "default",
        samples: Samples = count_samples,
        broadcast_buffers: bool = True,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.world = init() if world is None else world
        self._samples = samples
        self._broadcasts = broadcast_buffers
        self._parameters_list = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters_list:
            raise InputError("DataParallel: no parameter of the model requires a gradient")
        # Samples of this worker since gradients were last summed, and what a worker usually has.
        self._seen = 0.0
        self._usual = 0.0
        self._is_syncing = True
        self._in_backward = False
        self._sync: AllReduce | None = None
        if self.world.world_size > 1:
            check_same_model("DataParallel", module, self.world)
            copy_of_first([*module.parameters(), *module.buffers()], self.world)
            self._sync = self._make_sync(topology)

    def _make_sync(self, topology: str) -> AllReduce:
        members = self.world.members
        sync = AllReduce(
            self._parameters_list, members=members, copy_gradients=True, on_gradient=self._begin_backward
        )
        spec, device = read_topology_spec(topology), self._parameters_list[0].device
        sync.switch(resolve_topology(spec, members, sync.gradient_bytes, device)[0])
        return sync

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._sync is not None and self.training and torch.is_grad_enabled():
            self._seen += self._samples(*inputs, **named)
            if not self._usual:
                self._usual = float(broadcast_value(self._seen, 0)) or 1.0
            if self._broadcasts and self._is_syncing:
                copy_of_first(self.module.buffers(), self.world)
        return self.module(*inputs, **named)

    def _begin_backward(self) -> None:
        """Start the sums at the first gradient of a backward pass; its end completes them."""
        if self._in_backward or not self._is_syncing:
            return
        assert self._sync is not None
        self._in_backward = True
        self._sync.begin(keep_gradients=True)
        self._sync.before_backward(last=True, factor=self._factor)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @property
    def _factor(self) -> float:
        """This worker's weight if all workers have the usual number of samples."""
        # A backward pass without a forward of its own, such as a second loss: workers count alike.
        seen = self._seen or self._usual or 1.0
        return seen / ((self._usual or 1.0) * self.world.world_size)

    def _end_backward(self) -> None:
        assert self._sync is not None
        self._in_backward = False
        factor = self._factor
        total = float(self._sync.sum_gradients(torch.tensor([factor], dtype=torch.float64), factor)[0])
        self._seen = 0.0
        if total not in (0.0, 1.0):
            grads = [p.grad for p in self._parameters_list if p.grad is not None]
            torch._foreach_div_(grads, total)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to the gradients of this worker; the next one outside sums all of them."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def close(self) -> None:
        """End the thread that sums; all workers call it after the last step."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
