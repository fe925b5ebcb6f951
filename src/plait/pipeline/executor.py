"""The pipeline: one worker carries out its operations, one after the other, over the stages it holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from plait.comm.channels import Channels
from plait.data.call_model import compile_in_place, evaluation_mode
from plait.pipeline.cpu.layers import plain_forwards, use_fast_layers
from plait.pipeline.cpu.linear import with_same_strides
from plait.pipeline.cutting.check_model import check_buffers, check_stages
from plait.pipeline.cutting.cut import StageModule, evaluation_stages
from plait.pipeline.cutting.edges import find_routes
from plait.pipeline.gradient_sync import (
    MembersOf,
    find_stages,
    first_held,
    make_gradient_reducers,
    new_members,
    stage_replicas,
)
from plait.pipeline.layout import PipelineLayout, check_compiled
from plait.pipeline.microbatches import Work
from plait.pipeline.named_state import is_known, load_rest, model_state, optimizer_state, tied_aliases
from plait.pipeline.op_timings import Communicating, MessageTiming, OpTiming, Timings
from plait.pipeline.pipeline_parts import PipelineParts
from plait.pipeline.stage import InFlight, LossOf, StageRunner
from plait.pipeline.transfers import Hop, StageTransfers
from plait.pipeline.updates.frozen import FrozenAtStart, check_still_trained
from plait.pipeline.updates.stage_optimizer import StageOptimizer, summed_during_backward
from plait.pipeline.updates.tied_weights import make_tied
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update
from plait.profiler.traced_model import TracedModel
from plait.schema.topology_spec import TopologySpec
from plait.sync.buffers import average
from plait.verification.replay import Part

_TIMINGS_AT_ONCE = 1024


@dataclass
class _LocalStage:
    """A stage of this worker, with its hops and what is in flight in it.

    `landing` has come back, but gradients on their way to the other holders may lie in what it received.
    """

    runner: StageRunner
    incoming: list[Hop]
    outgoing: list[Hop]
    # Those of an evaluation, for which other values may pass between stages.
    evaluation_incoming: list[Hop]
    evaluation_outgoing: list[Hop]
    flights: dict[int, InFlight] = field(default_factory=dict)
    landing: InFlight | None = None


class PipelineExecutor:
    """This worker's part of a pipeline; all workers of the process group make one together.

    The traced model may be forgotten afterwards, and with it the stages of others.
    """

    def __init__(
        self,
        rank: int,
        pipeline_layout: PipelineLayout,
        traced: TracedModel,
        channels: Channels,
        parts: PipelineParts,
    ) -> None:
        check_stages(traced, pipeline_layout.stages)
        check_buffers(traced, pipeline_layout.stages)
        self.rank = rank
        self.pipeline_layout = pipeline_layout
        self.layout = pipeline_layout.layouts[pipeline_layout.pipeline_of(rank)]
        self.losses: dict[int, Tensor] = {}
        self.timings = Timings()
        # Called to take the timings away in a long run.
        self.on_timings: Callable[[], None] | None = None
        # What comes before each update, and what follows it before anything else uses the new weights.
        self.before_update: Callable[[], None] | None = None
        self.after_update: Callable[[], None] | None = None
        # What follows the backward of a microbatch in a stage, and what comes once gradients are summed.
        self.on_backward: Callable[[int, int], None] | None = None
        self.on_gradients: Callable[[], None] | None = None
        # Where a step is audited, who is told what it is given.
        self.on_content: Callable[[Part, int], None] | None = None
        # Whether random numbers of a stage go on from those of the stage before.
        self.carries_random_state = False
        # Seconds that all operations so far have taken.
        self.busy_s = 0.0
        self.clock_offset_s = 0.0
        self._parts = parts
        self._transfers = StageTransfers(
            rank, self.layout, channels, parts.device, parts.stages.unpacked, self._record_message
        )
        stages = {
            s: parts.stages.make(traced, pipeline_layout.stages[s]) for s in pipeline_layout.stages_of(rank)
        }
        # Samples of each trial that each stage has trained on since replicas last averaged their buffers.
        self._seen = {s: torch.zeros(parts.stages.trials or 1, dtype=torch.float64) for s in stages}
        self.modules: dict[int, nn.Module] = {s: stage.module for s, stage in stages.items()}
        self.parameters = _first_named(stages)
        self._aliases = tied_aliases(traced.model)
        stages_of = self._stages_of = find_stages(traced, pipeline_layout)
        self._fast_layers = self._speed_up(stages_of)
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self._frozen = FrozenAtStart(self.parameters.items())
        # An optimizer wants a parameter, also on a worker whose stages have none.
        self.optimizer = parts.optimizer(trained or [Parameter(torch.empty(0, 0))])
        # Of its own groups: a user's optimizer may leave out those that are empty in these stages.
        # A float may be that of fused trials, with one value for each.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.base_lrs = tuple(rate if isinstance(rate, float) else float(rate) for rate in rates)
        members_of = parts.members_of or partial(new_members, parts.rendezvous)
        self._updates = self._make_updates(stages_of, members_of)
        self._first_held = first_held(rank, pipeline_layout, stages_of)
        self._replicas = stage_replicas(pipeline_layout, members_of)
        self._hold(stages, traced)

    def _speed_up(self, stages_of: Mapping[str, Sequence[int]]) -> list[nn.Module]:
        """Compile the stages if asked to, otherwise use fast layers on the CPU; returns those layers."""
        layout, parts = self.pipeline_layout, self._parts
        if parts.compile:
            check_compiled(layout.schedule)
            for module in self.modules.values():
                compile_in_place(module, parts.device, "compile")
            return []
        if parts.device.type != "cpu" or parts.stages.trials is not None:
            return []
        fast: list[nn.Module] = []
        tied = [p for name, p in self.parameters.items() if len(stages_of[name]) > 1]
        add = layout.schedule is not Schedule.ZERO_BUBBLE
        for number, module in self.modules.items():
            # Weights that workers sum stay as the others have them.
            transpose = len(layout.holders(number)) == 1
            fast += use_fast_layers(module, add, transpose, tied)
        return fast

    def _make_updates(self, stages_of: Mapping[str, Sequence[int]], members_of: MembersOf) -> StageOptimizer:
        layout, parts, rendezvous = self.pipeline_layout, self._parts, self._parts.rendezvous
        # Some optimizers keep the gradients.
        copies = not is_known(self.optimizer)
        reducers = make_gradient_reducers(
            rendezvous, layout, stages_of, self.parameters, members_of, parts.topology, copies
        )
        step = self.optimizer.step
        tied = make_tied(layout, stages_of, self.modules, self.parameters, step, rendezvous, parts.clip_norm)
        cores = parts.cores // torch.get_num_threads()
        overlapped = summed_during_backward(self.rank, layout, parts.device, rendezvous.hosts, cores)
        return StageOptimizer(self.rank, layout, self.modules, self.optimizer, reducers, tied, overlapped)

    def _hold(self, stages: Mapping[int, StageModule], traced: TracedModel) -> None:
        """Make the runners of this worker's stages, with the routes into and out of each."""
        layout, parts = self.pipeline_layout, self._parts
        evaluated, evaluated_stages = evaluation_stages(traced, layout.stages)
        self._traced, self._evaluated = (
            replace(each, model=nn.Module(), constants={}, evaluation=None) for each in (traced, evaluated)
        )
        hops = [Hop(2 * i, route) for i, route in enumerate(find_routes(traced, layout.stages))]
        routes = enumerate(find_routes(evaluated, evaluated_stages), len(hops))
        further = [Hop(2 * i, route) for i, route in routes]
        self._held: dict[int, _LocalStage] = {}
        for number, stage in stages.items():
            runner = StageRunner(
                stage,
                self._updates.versions(number),
                LossOf(self._traced, parts.loss) if number == layout.last else None,
                parts.autocast,
                recompute=number in layout.recompute,
                split=layout.schedule is Schedule.ZERO_BUBBLE,
                scale=parts.loss_scale,
                begin=parts.stages.begin,
            )
            self._held[number] = _LocalStage(
                runner,
                [hop for hop in hops if hop.route.target == number],
                [hop for hop in hops if hop.route.source == number],
                [hop for hop in further if hop.route.target == number],
                [hop for hop in further if hop.route.source == number],
            )

    def run(self, ops: Iterable[Op], work: Work) -> None:
        """Carry out `ops`; afterwards nothing is in flight and the modules hold the newest weights."""
        if self.pipeline_layout.schedule.synchronous:
            self._run_batch(ops, work)
        else:
            self.advance(ops, work)
        self.finish(work)

    def advance(self, ops: Iterable[Op], work: Work) -> None:
        """Carry out `ops` of an asynchronous schedule; microbatches may be in flight afterwards."""
        for op in ops:
            self._carry_out(op, work)

    def finish(self, work: Work) -> None:
        """Put the newest weights into the modules, after all backwards of an interval."""
        for held in self._held.values():
            assert not held.flights, f"microbatches {sorted(held.flights)} never came back"
        self._updates.finish(work)

    def restart(self) -> None:
        """Continue with the weights that are now in the modules; nothing is in flight."""
        self._updates.restart()

    def _run_batch(self, ops: Iterable[Op], work: Work) -> None:
        """Carry out `ops`, and the updates among them together at the end."""
        updates: list[Update] = []
        last: Op | None = None
        for op in ops:
            if isinstance(op, Update):
                updates.append(op)
                continue
            if last is not None:
                self._carry_out(last, work)
            last = op
        if isinstance(last, Backward):
            self._updates.before_last_backward()
            self._held[last.stage].landing = self._backward(last)
        elif last is not None:
            self._carry_out(last, work)
        self._update(updates, work)

    def switch_topology(self, topology: TopologySpec) -> None:
        """Sum the gradients of replicas over `topology`; all workers call it when nothing is in flight."""
        self._updates.switch(topology)

    def close(self) -> None:
        """End the threads that sum gradients; all workers call it after their last operation."""
        self._updates.close()
        plain_forwards(self._fast_layers)
        self._fast_layers = []

    def fail(self, failure: BaseException) -> None:
        """Have whoever waits for gradients of other workers fail; from any thread."""
        self._updates.fail(failure)

    def take_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on with the state that another optimizer has for the same parameters."""
        for parameter in self.parameters.values():
            state = optimizer.state.get(parameter)
            if state is not None:
                self.optimizer.state[parameter] = {
                    k: with_same_strides(parameter, v) for k, v in state.items()
                }
        names = self.names
        load_rest(self.optimizer, names, optimizer_state(optimizer, names))

    @property
    def names(self) -> dict[Tensor, str]:
        """The name of each parameter of this worker."""
        return {parameter: name for name, parameter in self.parameters.items()}

    def counted_parameters(self) -> dict[int, list[Parameter]]:
        """By stage, those of which this worker is the first holder and that no other stage uses."""
        found: dict[int, list[Parameter]] = {}
        for name, parameter in self.parameters.items():
            stages = self._stages_of[name]
            if name in self._first_held and len(stages) == 1 and parameter.requires_grad:
                found.setdefault(stages[0], []).append(parameter)
        return found

    @property
    def loss_scale(self) -> float:
        """What losses, and so gradients until an update, are multiplied by."""
        return 1.0 if self._parts.loss_scale is None else float(self._parts.loss_scale.value)

    @property
    def loss_scales(self) -> Tensor:
        """The same for each trial, in float64."""
        scale = self._parts.loss_scale
        trials = self._parts.stages.trials or 1
        value = torch.as_tensor(1.0 if scale is None else scale.value, dtype=torch.float64)
        return value.cpu().expand(trials)

    def average_buffers(self) -> None:
        """Give all replicas of each stage the mean of their running statistics; all workers call it."""
        for stage, members in self._replicas.items():
            if stage in self.modules and members is not None:
                average(list(self.modules[stage].buffers()), members.group, self._seen[stage])
        for seen in self._seen.values():
            seen.zero_()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's and optimizer's state, by name, of which this worker is the first holder."""
        model: dict[str, Tensor] = {}
        for stage, module in self.modules.items():
            if self.pipeline_layout.holders(stage)[0] == self.rank:
                # A stage may know a tied one by a further name alone, and others may hold it before.
                held = {self._aliases.get(name, name): v for name, v in model_state(module).items()}
                others = self._stages_of.keys() - self._first_held
                model |= {name: value.cpu() for name, value in held.items() if name not in others}
        found = optimizer_state(self.optimizer, self.names)
        return model, {p: v.cpu() for p, v in found.items() if p.rpartition("/")[0] in self._first_held}

    def take_losses(self) -> Tensor:
        """The sums of the trials' losses since the last call, in float64; zeros if this worker has none."""
        losses = [loss.double() for loss in self.losses.values()]
        self.losses.clear()
        if not losses:
            return torch.zeros(self._parts.stages.trials or 1, dtype=torch.float64)
        return torch.stack(losses).sum(0).view(-1)

    def _carry_out(self, op: Op, work: Work) -> None:
        match op:
            case Update():
                self._update([op], work)
            case Forward():
                self._forward(op, work)
            case Backward():
                if self._updates.before_backward(op, work):
                    self._held[op.stage].landing = self._backward(op)
                else:
                    self._backward(op).release()
                    self._notify_backward(op)
            case BackwardInput():
                self._backward(op)
            case BackwardWeight():
                start = time.time()
                held = self._held[op.stage]
                flight = held.flights.pop(op.microbatch)
                with self._parts.slowed():
                    held.runner.backward_weight(flight)
                flight.release()
                self.record_timing(op, start)
                self._notify_backward(op)
        if len(self.timings.ops) >= _TIMINGS_AT_ONCE and self.on_timings is not None:
            self.on_timings()

    def _notify_backward(self, op: Backward | BackwardWeight) -> None:
        if self.on_backward is not None:
            self.on_backward(op.stage, op.microbatch)

    def record_timing(self, op: Op, start: float, waited_s: float = 0.0) -> None:
        """Record an operation, of which this worker waited so long for others."""
        offset, end = self.clock_offset_s, time.time()
        self.busy_s += end - start - waited_s
        self.timings.ops.append(OpTiming(op, start + offset, end + offset))

    def _record_message(self, op: Communicating, is_sent: bool, peer: int, peer_stage: int) -> MessageTiming:
        offset = self.clock_offset_s
        timing = MessageTiming(op, is_sent, peer, peer_stage, time.time() + offset, offset)
        self.timings.messages.append(timing)
        return timing

    def _forward(self, op: Forward, work: Work) -> None:
        held = self._held[op.stage]
        flight = self._begin(op, work)
        # Who has sent the microbatch has given what the versions of shared parameters are made of.
        flight.versions += self._updates.bring_tied(op, work)
        start = time.time()
        with self._parts.slowed():
            held.runner.forward(flight)
        if self.carries_random_state:
            flight.random_after = self._parts.stages.random_state()
        held.flights[op.microbatch] = flight
        self._seen[op.stage] += torch.tensor(work.samples(op.microbatch))
        if flight.loss is not None:
            self.losses[op.microbatch] = flight.loss.detach()
        self._transfers.send_forward(held.outgoing, op, flight)
        flight.free_outputs()
        self.record_timing(op, start)

    def _begin(self, op: Forward, work: Work, evaluating: bool = False) -> InFlight:
        """The microbatch as it enters the stage, received or loaded."""
        seed, weight = work.seed(op.microbatch, op.stage), work.weight(op.microbatch)
        flight = InFlight({}, seed, (op.version,), weight=weight, microbatch=op.microbatch)
        if op.stage == 0:
            inputs, flight.target = work.content(op.microbatch)
            if self.on_content is not None:
                part = Part(inputs, flight.target, weight, seed, op.microbatch).copied()
                self.on_content(part, sum(work.samples(op.microbatch)))
            traced = self._evaluated if evaluating else self._traced
            tensors = self._parts.stages.order_inputs(traced, inputs)
            flight.inputs |= dict(zip(traced.inputs, tensors, strict=True))
        held = self._held[op.stage]
        carries = self.carries_random_state and not evaluating
        for hop in held.evaluation_incoming if evaluating else held.incoming:
            self._transfers.receive_forward(hop, op, flight, carries, is_timed=not evaluating)
        return flight

    def _backward(self, op: Backward | BackwardInput) -> InFlight:
        held = self._held[op.stage]
        flight = held.flights[op.microbatch]
        grads, messages = self._transfers.receive_backward(held.outgoing, op)
        start = time.time()
        with self._parts.slowed():
            held.runner.backward(flight, grads)
        if messages or flight.deferred is not None:
            held.runner.own_gradients(flight, messages)
        self._updates.keep_tied(op.stage, flight.versions)
        # What is left of a split backward may still read the gradients.
        flight.messages += messages
        self._transfers.send_backward(held.incoming, op, flight)
        if isinstance(op, Backward):
            del held.flights[op.microbatch]
        self.record_timing(op, start)
        return flight

    def _update(self, updates: Sequence[Update], work: Work) -> None:
        """Agree with the other holders of this worker's parameters and write their next version."""
        start = time.time()
        self._frozen.check()
        for update in updates:
            check_still_trained(self.parameters, self._updates.frozen(update.stage))
        self._updates.sum_gradients(updates, work)
        if self.on_gradients is not None:
            self.on_gradients()
        is_finite = self._unscale()
        if self._parts.clip_norm is not None and is_finite:
            self._updates.clip(updates, self._parts.clip_norm, self._parts.device, self._parts.everyone)
        if self.before_update is not None:
            self.before_update()
        began = time.time()
        if is_finite:
            self._updates.write(updates)
        else:
            self._updates.leave_out(updates)
        if self.after_update is not None:
            self.after_update()
        for update in updates:
            held = self._held[update.stage]
            if held.landing is not None:
                held.landing.release()
                held.landing = None
            # Writing is this worker's own work, once for all updates; before it, it waits for others.
            waited_s = began - start if update is updates[0] else time.time() - start
            self.record_timing(update, start, waited_s)

    def _unscale(self) -> bool:
        """Take the loss scale out of the gradients, if there is one; whether all workers have finite ones."""
        if self._parts.loss_scale is None:
            return True
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        return self._parts.loss_scale.unscale(grads, self._parts.device, self._parts.everyone)

    def evaluate(self, microbatches: int, work: Work, measure: Callable[[Any, Any, int], None]) -> None:
        """Send `microbatches` of this pipeline forward; the last stage hands outputs to `measure`."""
        with contextlib.ExitStack() as modes:
            for module in self.modules.values():
                modes.enter_context(evaluation_mode(module))
            self._evaluate(microbatches, work, measure)
        # Models that do more in evaluation mode may have put weights into other memory.
        self.restart()

    def _evaluate(self, microbatches: int, work: Work, measure: Callable[[Any, Any, int], None]) -> None:
        for microbatch in range(microbatches):
            for stage, held in sorted(self._held.items()):
                if self.layout.worker(stage, microbatch) == self.rank:
                    op = Forward(stage, microbatch)
                    flight = self._begin(op, work, evaluating=True)
                    held.runner.evaluate(flight)
                    if stage == self.pipeline_layout.last:
                        output = self._evaluated.rebuild_output({**flight.inputs, **flight.outputs})
                        measure(output, flight.target, microbatch)
                    self._transfers.send_forward(held.evaluation_outgoing, op, flight, is_timed=False)
                    flight.release()


def _first_named(stages: Mapping[int, Any]) -> dict[str, Parameter]:
    """The worker's parameters, each once, by the first name that the model has for it."""
    found: dict[str, Parameter] = {}
    for stage in stages.values():
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            found.setdefault(stage.first_names[name], parameter)
    return dict(sorted(found.items()))
