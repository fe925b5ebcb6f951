"""`DataParallel`: a copy of the model on each worker, with the gradient of the samples of all."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Never, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from plait.api.accumulated import NOTHING, AccumulatedBatches, are_weighed
from plait.api.same_model import (
    Copies,
    TrainedParameters,
    copies_of,
    copy_of_first,
    draw_apart,
    restore,
    share_model,
)
from plait.api.step_rules import StepRules
from plait.api.world import World, init
from plait.core.errors import InputError, LostPeer, PeerError
from plait.core.shown import shown
from plait.data.call_model import fused_parts
from plait.launcher.membership import Memberships
from plait.schema.topology_spec import TopologySpec, check_topology, fitting, read_topology_spec
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.buckets import AllReduce

Samples = Callable[..., float]
# Factors whose sum differs from 1 by less have the sum 1.
_ROUNDING = 1e-14


def count_samples(*inputs: Any, **named: Any) -> float:
    """The length of the first tensor among the inputs of a forward, whose first axis is the batch."""
    for leaf in tree_leaves((inputs, named)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return float(len(leaf))
    return 1.0


def _counter(module: nn.Module) -> Samples:
    """What counts the samples of a forward, unless the user says."""
    fused = fused_parts(module)
    if not fused:
        return count_samples
    if module is not fused[0]:
        raise InputError(
            "DataParallel: found a model that holds a fused module, expected samples=, a function of the "
            "model's arguments that counts the rows of each trial, or the fused module itself"
        )
    count: Samples = cast("Any", module).batch_rows
    return count


def check_unwrapped(what: str, model: object) -> None:
    """Refuse a model that is wrapped to be trained by several workers already."""
    if isinstance(model, (DataParallel, DistributedDataParallel, nn.DataParallel)):
        raise InputError(
            f"{what}: found a {type(model).__name__}, whose workers have equal weights after each step; give "
            "it the model itself, and leave the other out"
        )


class WorkerNorms:
    """The squared norms of the workers' gradients, times their samples, in the last backward pass.

    `sums` over the workers: of these, of the samples, and the number of workers. The gradient of a worker
    alone is that of the whole batch, and is no part of it.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)

    def take(self, samples: int) -> Tensor:
        """The sums, for a batch of `samples` over all workers."""
        if self.sums is None:
            raise InputError("update: no backward pass of the DataParallel was seen before it")
        scale = samples / self.sums[1]
        return torch.stack([self.sums[0] * scale, self.sums[1] * scale, self.sums[2]])


class DataParallel(nn.Module):
    """Wraps a model that every worker has; after `backward` all have the gradient of the whole batch.

    It behaves as torch's DistributedDataParallel: the `module` of rank 0 is copied to all workers, gradients
    are summed in buckets while backward still runs, buffers are those of rank 0 (unless `broadcast_buffers`
    is False), and `no_sync` accumulates. In addition

    - batches may have unlike sizes: gradients are weighted by the number of samples of each worker, so that a
      loss that is a mean over the batch has the gradient of one worker with all samples. `samples` counts
      those of a forward; by default it is the length of the first tensor (of a trial's part of it, where
      `module` is a fused one). `samples=lambda *_: 1` weighs all workers alike;
    - parameters may be without a gradient on some or all workers in some steps; nothing has to be declared;
    - `topology` is the graph that sums travel: `default`, `auto` (measured now), `ring`, `tree`, `star`, ...;
    - `state_dict` has the names of the plain model.

    All workers run the same number of backward passes. Optimizers step after them, not in hooks of gradients.

    Examples:
        ```python
        model = plait.DataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        ```
    """

    def __init__(
        self,
        module: nn.Module,
        topology: str = "default",
        samples: Samples | None = None,
        broadcast_buffers: bool = True,
        world: World | None = None,
        **others: Never,
    ) -> None:
        super().__init__()
        for name in others:
            raise InputError(
                f"DataParallel: {name} is not taken; unused parameters, buckets and static graphs need "
                "nothing declared, and the device is that of the model"
            )
        if not isinstance(module, nn.Module):
            raise InputError(f"DataParallel: found {shown(module)}, expected a torch.nn.Module")
        check_unwrapped("DataParallel", module)
        if samples is None:
            samples = _counter(module)
        if not callable(samples):
            raise InputError(
                f"DataParallel: samples: found {shown(samples)}, expected a function that counts those of a "
                "forward's arguments, such as samples=lambda tokens: (tokens != 0).sum().item()"
            )
        read_topology_spec(topology)
        self.module = module
        self.world = init() if world is None else world
        self._samples = samples
        self._broadcasts = broadcast_buffers
        self._trained = TrainedParameters("DataParallel", module)
        # Listed once, as the search takes as long as small sums; modules may replace the tensors.
        self._buffer_names = [(each, name) for each in module.modules() for name in each._buffers]
        # What the next sum is about; the batches of the last one until the next forward, as several backward
        # passes may follow one forward.
        self._batches = AccumulatedBatches()
        # Whether a backward pass came since the last forward.
        self._has_gradients = False
        self._has_warned = False
        self._is_summed = True
        # The mean over the workers at the last sum.
        self._usual = 1.0
        self._is_syncing = True
        self._in_backward = False
        self._sums = 0
        self._norms: WorkerNorms | None = None
        self._sync: AllReduce | None = None
        self.topology = topology
        self.rules = StepRules()
        # Whether gradients are discarded until `connect`: a worker was lost, or takes no part any more.
        self.is_broken = False
        # The buffers from before the first forward of this step.
        self._kept_buffers: Copies = []
        # Whether the last forward with gradients was in training mode.
        self._was_training = True
        self._is_copy = False
        self._start()

    def _start(self) -> None:
        """Connect the copies of the model; all workers call it together."""
        self._is_copy = False
        if self.world.world_size > 1:
            share_model("DataParallel", self.module, self.world)
            self.connect()

    def connect(self) -> None:
        """Sum gradients with the workers that `world` has now, who all call it with equal models."""
        self.close()
        self._usual, self._is_summed, self._in_backward, self.is_broken = 1.0, True, False, False
        self._batches = AccumulatedBatches()
        draw_apart(self.module, self.world)
        if self.world.world_size > 1:
            self._sync = self._make_sync()
        if self._norms is not None:
            self.measure_parts()

    def follow_losses(self, memberships: Memberships) -> None:
        """Have the loss of a worker end the waits for its gradients, but no sum after the next `connect`."""
        if self._sync is not None:
            memberships.on_loss(self._sync.fail)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy of the model; workers that train it, too, are connected at its first forward."""
        alone = replace(self.world, world_size=1)
        module = copy.deepcopy(self.module, memo)
        copied = DataParallel(module, self.topology, self._samples, self._broadcasts, alone)
        copied.world, copied._is_copy = self.world, True
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def _make_sync(self) -> AllReduce:
        members = self.world.members
        sync = AllReduce(
            self._trained.parameters, members, copy_gradients=True, on_gradient=self._begin_backward
        )
        spec, device = self._topology_spec(), self._trained.parameters[0].device
        sync.begin(keep_gradients=True)
        topology, chosen = resolve_topology(spec, members, sync.gradient_bytes, device)
        # Measured once, also if workers change.
        self.topology = chosen or self.topology
        sync.switch(topology)
        return sync

    def _topology_spec(self) -> TopologySpec:
        """The topology, or the default one if it does not fit workers that have changed."""
        spec = read_topology_spec(self.topology)
        if self.world.launched is not None:
            return fitting(spec, self.world.world_size)
        check_topology(spec, self.world.world_size)
        return spec

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._is_copy and torch.is_grad_enabled():
            self._start()
        if self._sync is not None and torch.is_grad_enabled():
            self._trained.check()
            self._was_training = self.training
            if self._is_summed and not self.is_broken:
                self._copy_buffers()
            count = self._samples(*inputs, **named)
            if not 0 <= count < math.inf:
                raise InputError(
                    f"DataParallel: samples returned {shown(count)}, expected the number of samples that a "
                    "loss of this forward is a mean over: 0 or more"
                )
            self._add_batch(count)
        return self.module(*inputs, **named)

    def _add_batch(self, count: float) -> None:
        """Weigh the samples of a forward, and the gradients that were accumulated before it."""
        if self._is_summed:
            self._batches.begin()
        ratio = self._batches.add(count, self.world.batch, self._has_gradients and not self._is_summed)
        self._is_summed = self._has_gradients = False
        if abs(ratio - 1) > _ROUNDING:
            for parameter in self._trained.parameters:
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(ratio)

    def _copy_buffers(self) -> None:
        """Copy the buffers of rank 0 to all workers, before the first forward of a step."""
        found = (module._buffers[name] for module, name in self._buffer_names)
        buffers = [buffer for buffer in found if buffer is not None]
        try:
            if self._broadcasts and self._was_training:
                sent = copy_of_first(buffers, self.world)
                if self.rules.keeps_buffers:
                    copies = [(same, flat.clone() if len(same) == 1 else flat) for same, flat in sent]
                    self._kept_buffers = copies
                return
        except RuntimeError as failure:
            self._discard_if_lost(failure, "forward")
        if self.rules.keeps_buffers:
            self._kept_buffers = copies_of(buffers)

    def restore_buffers(self) -> None:
        """Undo what the forwards since the last update have changed in the buffers."""
        restore(self._kept_buffers)

    def forget_buffers(self) -> None:
        """Drop what was kept: the first forward of the next step keeps its buffers."""
        self._kept_buffers = []

    def _discard_if_lost(self, failure: RuntimeError, what: str) -> None:
        """Go on without gradients until `connect` if a worker is lost; otherwise raise.

        The error says in words that another worker took no part in a `what` pass, which all run together.
        """
        if self.rules.lose(failure):
            self._discard()
            return
        if type(failure) is RuntimeError and "gloo" not in str(failure):
            raise failure
        kind, peer, why = LostPeer.GONE, None, "a connection to another worker failed"
        if isinstance(failure, PeerError):
            kind, peer, why = failure.kind, failure.peer, str(failure)
        raise PeerError(
            f"DataParallel: not all workers took part in {what} pass {self._sums + 1} of worker "
            f"{self.world.rank} ({why}). If the other worker shows no error, it had fewer batches: all "
            "workers run the same number of backward passes. plait.DataLoader gives all the same number; "
            "with another loader, give workers that have no samples left tensors of length 0, and skip a "
            "batch on all workers or on none",
            kind,
            peer,
        ) from failure

    def _discard(self) -> None:
        self.is_broken = self._is_summed = True
        if self._sync is not None:
            self._sync.begin(keep_gradients=True)
        for parameter in self._trained.parameters:
            # Zeros, as the loop may clip or unscale them.
            parameter.grad = torch.zeros_like(parameter)

    def _begin_backward(self) -> None:
        """Start the sums at the first gradient of a backward pass; its end completes them."""
        self._has_gradients = True
        if self._in_backward or not self._is_syncing or self.is_broken:
            return
        assert self._sync is not None
        self._in_backward = True
        self._sync.before_backward(last=True, factor=self._factor)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @property
    def _factor(self) -> float:
        """This worker's weight if the mean over the workers is the usual one."""
        return self._batches.weight / (self._usual * self.world.world_size)

    def _end_backward(self) -> None:
        assert self._sync is not None
        self._in_backward = False
        factor, seen = self._factor, self._batches.samples
        latest = self._batches.latest / (self._usual * self.world.world_size)
        weigh_norm = None if self._norms is None else seen / factor**2 if factor else 0.0
        try:
            scalars = self._scalars(latest, seen, self._batches.numbers())
            sums = self._sync.sum_gradients(scalars, factor, weigh_norm)
        except RuntimeError as failure:
            self._discard_if_lost(failure, "backward")
            return
        self._sums += 1
        self._trained.check_hooks()
        total, samples, workers, *numbers_and_flags, _ = sums.tolist()
        numbers, flags = numbers_and_flags[:3], numbers_and_flags[3:]
        if not self.rules.are_gradients_kept(flags):
            self._discard()
            return
        if not are_weighed(numbers, samples, workers):
            self._warn_of_shares()
        if self._norms is not None:
            self._norms.sums = sums[[-1, 1, 2]]
        # What no_sync accumulates from now on stays with the parameters.
        self._sync.begin(keep_gradients=True)
        self._is_summed = True
        if total == 0:
            return
        self._usual *= total
        grads = [p.grad for p in self._trained.parameters if p.grad is not None]
        if grads and abs(total - 1) > _ROUNDING:
            torch._foreach_div_(grads, total)

    def _warn_of_shares(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "DataParallel: batches whose gradients were accumulated under no_sync were divided among "
                "the workers in unlike proportions, so that the gradient is not exactly that of one "
                "process; give the model the samples of a plait.DataLoader as they come, use "
                "drop_last=True, or do not accumulate over the smaller last batch",
                stacklevel=2,
            )

    def _scalars(self, factor: float, seen: float, numbers: Sequence[float] = NOTHING) -> Tensor:
        # The last one is the squared norm of this worker's gradient, which is sent times the factor.
        return torch.tensor([factor, seen, 1.0, *numbers, *self.rules.flags(), 0.0], dtype=torch.float64)

    def sum_nothing(self) -> list[float]:
        """Take part in the sums of a step of the others without samples; returns the sums of the flags."""
        assert self._sync is not None
        self._copy_buffers()
        self._sync.begin()
        self._sync.before_backward(last=False, factor=0.0)
        sums = self._sync.sum_gradients(self._scalars(0.0, 0.0), 0.0).tolist()
        return sums[3 + len(NOTHING) : -1]

    def measure_parts(self) -> WorkerNorms:
        """Measure the workers' gradients from now on, as `plait.GradientNoiseScale(model)` asks for."""
        if self._norms is None:
            self._norms = WorkerNorms()
        if self._sync is not None:
            self._norms.sums = None
            self._sync.measure_norms()
        return self._norms

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
