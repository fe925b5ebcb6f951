"""The stages that a worker holds of a model in a user's loop: steps, outputs and state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from plait.api.world import World
from plait.comm.channels import connect
from plait.comm.collectives import broadcast_named, broadcast_value, gather_named
from plait.core.splits import split
from plait.data import loader
from plait.data.call_model import evaluated_weights
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout, one_batch, stream
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.pipeline.named_state import (
    Tensors,
    load_optimizer_state,
    tied_aliases,
    unpacked,
    whole_state,
)
from plait.pipeline.pipeline_parts import PipelineParts
from plait.pipeline.stage import ordered_inputs
from plait.pipeline.verify.prepare import free_other_stages
from plait.planner.schedules.operations import Forward, Op
from plait.profiler.traced_model import TracedModel

MakeOptimizer = Callable[[Sequence[Parameter]], torch.optim.Optimizer]
# What schedulers set in the groups of an optimizer.
_RATES = ("lr", "momentum", "betas", "weight_decay")
# After this number of microbatches an asynchronous pipeline drains, to forget the earlier ones.
_MOST = 1 << 14


@dataclass(frozen=True)
class _Endless:
    """An interval to which steps are still added."""

    total: int = 1 << 60

    def admits(self, pipeline: int, microbatch: int) -> bool:
        return True


@dataclass
class _OpenInterval:
    """The microbatches of an asynchronous schedule since it last drained.

    `ops` are this worker's operations if steps are added for ever; `next_op` is the first that belongs to a
    step which is not there yet, and `done` counts those carried out. `rates` are the learning rates by step.
    """

    work: MicrobatchSource
    ops: Iterator[Op]
    next_op: Op | None = None
    done: int = 0
    rates: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


class PipelineStages:
    """This worker's stages; all workers make one together, and call each method together."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        traced: TracedModel,
        layout: PipelineLayout,
        parts: PipelineParts,
        seed: int,
    ) -> None:
        self._rank, self._layout, self._seed = world.rank, layout, seed
        self._pipeline = layout.pipeline_of(self._rank)
        self.reads_inputs = 0 in layout.stages_of(self._rank)
        self._device = world.device
        self._model, self._tied = model, tied_aliases(model)
        self._traced, self._evaluated = traced, traced.evaluation or traced
        self._channels = connect(
            world.rendezvous, layout.workers, window=layout.window(), device=world.device
        )
        self._executor = PipelineExecutor(self._rank, layout, traced, self._channels, parts)
        free_other_stages(model, self._executor, traced)
        self.optimizer = self._executor.optimizer
        self._open: _OpenInterval | None = None
        self._steps = 0

    def step(self, batch: tuple[Any, Any], samples: int, microbatches: int) -> Tensor:
        """Train on a batch; returns this worker's share of its mean loss."""
        # On all workers, before the first one sends anything.
        ((inputs, _), _) = next(loader.cut(batch, samples, microbatches))
        ordered_inputs(self._traced, inputs)
        cut = self._cut(samples, microbatches)
        if self._layout.schedule.synchronous:
            work = self._source(cut, batch)
            self._executor.run(one_batch(self._layout, self._rank, self._local(microbatches)), work)
            share = self._take_losses(work, samples)
        elif microbatches < self._layout.microbatches or self._layout.shared:
            # The rounds of a smaller batch do not fit to others. A worker with several stages may have ops
            # of the next step before those that give the loss of this one.
            self.drain()
            work = self._source(cut, batch)
            self._executor.run(stream(self._layout, self._rank, work), work)
            share = self._take_losses(work, samples)
        else:
            share = self._feed(cut, batch, samples)
        self._executor.timings.clear()
        self._steps += 1
        return share

    def _cut(self, samples: int, microbatches: int) -> list[Microbatch]:
        sizes = [len(rows) for rows in split(samples, microbatches)]
        return [Microbatch(self._steps, i, 0, range(size)) for i, size in enumerate(sizes)]

    def _local(self, microbatches: int) -> int:
        return self._layout.local(microbatches, self._pipeline)

    def _source(
        self,
        cut: Sequence[Microbatch],
        batch: tuple[Any, Any],
        set_lr: Callable[[int, int], None] = lambda step, index: None,
    ) -> MicrobatchSource:
        self._batch = batch, sum(len(each.samples) for each in cut), len(cut)
        return MicrobatchSource(
            self._layout, self._rank, cut, seed=self._seed, fetch=self._contents, set_lr=set_lr
        )

    def _contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        """Inputs and target of those that enter through this worker, on its device."""
        if microbatches:
            parts = [part for part, _ in loader.cut(*self._batch)]
            for each in microbatches:
                yield loader.to_device(parts[each.index], self._device, None)

    def _feed(self, cut: Sequence[Microbatch], batch: tuple[Any, Any], samples: int) -> Tensor:
        """Carry out what can be done until the next step is there."""
        if self._open is not None and self._open.work.total + len(cut) > _MOST:
            self.drain()
        if self._open is None:
            ops = stream(self._layout, self._rank, _Endless())
            self._open = _OpenInterval(self._source(cut, batch, self._set_rates), ops)
        else:
            self._batch = batch, samples, len(cut)
            self._open.work.add(cut)
        interval = self._open
        interval.rates[self._steps] = now = self._rates()
        self._executor.advance(self._until_next_step(interval), interval.work)
        self._write_rates(now)
        # Torch's schedulers warn where no update precedes their step; that of this step may be in flight.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return self._take_losses(interval.work, samples)

    def _until_next_step(self, interval: _OpenInterval) -> Iterator[Op]:
        work, held = interval.work, [] if interval.next_op is None else [interval.next_op]
        for op in itertools.chain(held, interval.ops):
            if isinstance(op, Forward):
                number = op.microbatch * self._layout.pipelines + self._pipeline
                if number >= work.total:
                    interval.next_op = op
                    return
            yield op
            interval.done += 1

    def drain(self) -> None:
        """Complete what is in flight under an asynchronous schedule."""
        interval = self._open
        if interval is not None:
            now = self._rates()
            ops = stream(self._layout, self._rank, interval.work)
            self._executor.advance(itertools.islice(ops, interval.done, None), interval.work)
            self._executor.finish(interval.work)
            self._write_rates(now)
            self._open = None

    def _rates(self) -> list[dict[str, Any]]:
        return [{k: group[k] for k in _RATES if k in group} for group in self.optimizer.param_groups]

    def _write_rates(self, rates: Sequence[Mapping[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, rates):
            group.update(values)

    def _set_rates(self, step: int, index: int) -> None:
        """An update has the rates of its step, also if it is carried out in a later one."""
        if self._open is not None:
            self._write_rates(self._open.rates.get(step, ()))

    def _take_losses(self, work: MicrobatchSource, samples: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for microbatch, loss in self._executor.losses.items():
            share = len(work.microbatch(microbatch).samples) / samples
            total += loss.double().cpu() * (share / work.weight(microbatch))
        self._executor.losses.clear()
        return total

    def evaluate(self, inputs: Any, samples: int, microbatches: int) -> tuple[list[list[Any]], Any]:
        """For each microbatch the leaves of the outputs, on all workers, and their form."""
        self.drain()
        self._executor.average_buffers()
        work = self._source(self._cut(samples, microbatches), (inputs, None))
        outputs: Tensors = {}

        def keep(output: Any, _target: Any, microbatch: int) -> None:
            index = work.microbatch(microbatch).index
            for number, leaf in enumerate(pytree.tree_leaves(output)):
                if isinstance(leaf, Tensor):
                    outputs[f"{index}/{number}"] = leaf.detach().clone()

        with evaluated_weights(self.optimizer):
            self._executor.evaluate(self._local(microbatches), work, keep)
        gathered: Tensors = {}
        for holder in self._layout.holders(self._layout.last):
            gathered |= broadcast_named(outputs, holder)
        known = self._evaluated.output_leaves
        parts = [
            [
                gathered[f"{index}/{number}"].to(self._device) if isinstance(leaf, fx.Node) else leaf
                for number, leaf in enumerate(known)
            ]
            for index in range(microbatches)
        ]
        return parts, self._evaluated.output_spec

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model on rank 0; empty on the others."""
        self.drain()
        self._executor.average_buffers()
        gathered = gather_named(self._executor.state()[0], 0)
        if self._rank:
            return {}
        whole = whole_state(self._model, gathered, self._tied)
        return unpacked({name: whole[name] for name in self._model.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that rank 0 has, tensor by tensor."""
        self.drain()
        modules = self._executor.modules.values()
        needed = {self._first(name) for module in modules for name in module.state_dict()}
        local = self._receive(state, lambda name: self._first(name) in needed)
        known = {self._first(name): value for name, value in local.items()}
        for module in modules:
            module.load_state_dict(unpacked({n: known[self._first(n)] for n in module.state_dict()}))
        if self._rank == 0:
            # Tensors that no stage uses; those of others are empty here.
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and tensor.shape == state[name].shape:
                    tensor.data.copy_(state[name])
        self._executor.restart()

    def _first(self, name: str) -> str:
        """The first name of a tied parameter or buffer."""
        return self._tied.get(name, name)

    def _receive(self, state: Mapping[str, Any], is_local: Callable[[str], bool]) -> Tensors:
        """The tensors of rank 0's `state` whose names are local, sent one at a time."""
        local = Tensors()
        for name in broadcast_value(list(state), 0):
            tensors = broadcast_named({name: state[name]} if self._rank == 0 else None, 0)
            if is_local(name):
                local |= tensors
        return local

    def optimizer_state(self) -> Tensors:
        """The optimizer's state by `parameter name/key` on rank 0; empty on the others."""
        self.drain()
        return gather_named(self._executor.state()[1], 0)

    def load_optimizer_state(self, state: Tensors) -> None:
        self.drain()
        local = self._receive(state, lambda name: name.rpartition("/")[0] in self._executor.parameters)
        load_optimizer_state(self.optimizer, self._executor.names, local)

    def close(self) -> None:
        self.drain()
        self._executor.close()
        dist.barrier()
        self._channels.close()
