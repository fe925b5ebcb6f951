"""`Pipeline`: one model over several workers, in a training loop of one's own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from plait.api.data_parallel import check_unwrapped
from plait.api.same_model import share_model
from plait.api.stages.checked_loss import CheckedLoss
from plait.api.stages.pipeline_stages import MakeOptimizer, PipelineStages
from plait.api.stages.plain_attributes import PlainAttributes
from plait.api.stages.prepare_stages import StagePreparation, samples_of, two_examples
from plait.api.stages.stage_layout import (
    PlanLike,
    check_names,
    check_plan,
    find_layout,
    find_schedule,
)
from plait.api.stages.step_inputs import StepInputs, in_words_of_step
from plait.api.stages.step_loss import StepLoss
from plait.api.stages.whole_model import WholeModel
from plait.api.world import World, init
from plait.comm.collectives import broadcast_value
from plait.core.errors import InputError
from plait.core.shown import shown
from plait.core.splits import split
from plait.data.call_model import is_compiled, set_mode
from plait.data.seeding import keep_random_states
from plait.pipeline.cutting.whole_modules import Stages
from plait.pipeline.microbatches import microbatch_count
from plait.pipeline.named_state import Tensors, remember_start
from plait.pipeline.pipeline_parts import PipelineParts
from plait.pipeline.stage import Autocast, Loss
from plait.pipeline.verify.optimizer_traits import find_traits, objection_in_stages
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.trace import Inputs
from plait.schema.topology_spec import read_topology_spec

log = logging.getLogger(__name__)


class _Engine(Protocol):
    """What trains the model: its stages, or the whole of it."""

    optimizer: torch.optim.Optimizer
    reads_inputs: bool

    def step(self, batch: tuple[Any, Any], samples: int, microbatches: int) -> Tensor: ...
    def evaluate(self, inputs: Any, samples: int, microbatches: int) -> tuple[list[list[Any]], Any]: ...
    def drain(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def optimizer_state(self) -> Tensors: ...
    def load_optimizer_state(self, state: Tensors) -> None: ...
    def close(self) -> None: ...


class Pipeline:
    """Trains a model whose stages are on several workers; each batch passes through in microbatches.

    All workers make it together, with the same model (the weights are those of rank 0), and call each of its
    methods together. The model needs no change: it is traced with `example_inputs`, a tuple of the arguments
    of its forward or a dict for keywords, cut into stages, and the stages are compared with the model before
    the first step (outputs, gradients, buffers). `verify=False` leaves the comparison out. In one process
    nothing is cut: it is plain training that accumulates over the microbatches.

    Args:
        model: the model, on the CPU or on the worker's device, to which it is moved. Afterwards it belongs to
            the pipeline: tensors that only other workers hold are emptied in it.
        plan: a plan (`plait.plan`), a number of stages (cut where they take equal times, with equal numbers
            of replicas), the names of the first layers of all stages but the first, or `auto` (the fastest
            plan for all workers, with layers and links as measured now).
        example_inputs: a batch of inputs. The batch size is free, and so is the length of integer inputs.
        loss: `loss(output, target)`, a scalar that is the mean over samples: the loss of a batch is the mean
            of those of its microbatches, weighted by samples. In the first ones it is checked, with a
            warning, that it is such a mean.
        optimizer: makes the optimizer of some parameters: `partial(torch.optim.AdamW, lr=1e-3)`.
        schedule: `flush` (default), `gpipe`, `zero-bubble`, `interleaved` and `none` update once a batch, as
            a plain loop does; `stash` and `2bw` never drain, and their gradients are of older weights.
        microbatches: of a batch; by default those of the plan, or four for each worker. Under `stash` each
            round of replicas is an update, so the default is one round.
        other_inputs: a second example that differs in other sizes which change between batches.
        clip_norm: limit of the gradient's norm, of the whole model (of each stage under `stash` and `2bw`).
        autocast: makes the context of forwards, such as `partial(torch.autocast, "cuda", torch.bfloat16)`.
        recompute: the stages that compute their activations again in backward.
        topology: the graph that sums of the replicas of a stage travel.
        compile: whether each stage (in one process the model) runs compiled, by torch.compile.

    Examples:
        ```python
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        pipe = plait.Pipeline(
            model,
            plait.init().world_size,  # as many stages as workers
            example_inputs=torch.randn(12, 8),
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        x = torch.randn(12, 8)
        loss = pipe.step(x, x[:, :1])
        pipe.close()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlanLike = "auto",
        *,
        example_inputs: Tensor | Inputs,
        loss: Loss,
        optimizer: MakeOptimizer,
        schedule: str | None = None,
        microbatches: int | None = None,
        other_inputs: Tensor | Inputs | None = None,
        clip_norm: float | None = None,
        autocast: Autocast = contextlib.nullcontext,
        recompute: Collection[int] = (),
        topology: str = "default",
        compile: bool = False,
        verify: bool = True,
        world: World | None = None,
    ) -> None:
        self.world = init() if world is None else world
        _check_arguments(model, loss, optimizer, microbatches, clip_norm)
        check_plan(plan)
        self._inputs = StepInputs(example_inputs, self.world.world_size, other_inputs is None, verify)
        self._expected = {name: _shape(value) for name, value in model.state_dict().items()}
        self._microbatches = microbatches or 1
        self._largest = 0
        self._never_drains = False
        # Of modules whose code is traced; none in one process.
        self._attributes = PlainAttributes(nn.Module(), ())
        # The layers of each stage, named as in a profile; none in one process.
        self.stages: Stages = ()
        checked = CheckedLoss(loss) if verify and microbatches != 1 else loss
        made = partial(_make_optimizer, optimizer)
        device, meeting = self.world.device, self.world.rendezvous
        parts = PipelineParts(checked, made, device, autocast, meeting, clip_norm, compile=compile)
        model = model.to(device)
        self._engine: _Engine
        examples = two_examples(example_inputs, other_inputs, device)
        preparation = StagePreparation(self.world, model, examples, autocast)
        if self.world.world_size == 1:
            check_names(plan, model, preparation.trace)
            updates_each = schedule is not None and find_schedule(schedule) is Schedule.STASH
            self._engine = WholeModel(model, parts, updates_each)
            return
        share_model("Pipeline", model, self.world)
        profile = partial(preparation.profile, example_inputs)
        samples = samples_of(example_inputs)
        layout = find_layout(plan, self.world, schedule, microbatches, samples, preparation.trace, profile)
        wrong = [stage for stage in recompute if not 0 <= stage <= layout.last]
        if wrong:
            raise InputError(f"recompute: found stage {wrong[0]}, expected stages 0 to {layout.last}")
        layout = replace(layout, recompute=layout.recompute | frozenset(recompute))
        verified = preparation.prepare(layout, verify)
        for note in verified.notes:
            log.warning("Pipeline: %s", note)
        layout = replace(layout, stages=verified.stages)
        self._microbatches, self.stages = layout.microbatches, verified.fine
        self._never_drains = not layout.schedule.synchronous
        make, named = parts.optimizer, dict(model.named_parameters())
        traits = find_traits(lambda parameters, _: make(parameters), named)
        kind = type(make([Parameter(torch.zeros(1, 1))])).__name__
        if why := objection_in_stages(kind, traits, verified.traced, layout):
            raise InputError(f"optimizer: {why}")
        seed = broadcast_value(torch.initial_seed() % (1 << 31), 0)
        parts = replace(parts, topology=read_topology_spec(topology))
        self._attributes = PlainAttributes(model, (layer.id for layer in verified.traced.layers))
        self._engine = PipelineStages(self.world, model, verified.traced, layout, parts, int(seed))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this worker's stages, for a scheduler of learning rates or to look at.

        Under `stash` and `2bw` an update has the rates that were set when its batch was given to `step`.
        """
        return self._engine.optimizer

    @property
    def microbatches(self) -> int:
        """Microbatches of a batch."""
        return self._microbatches

    @property
    def reads_inputs(self) -> bool:
        """Whether the contents of batches are used on this worker; others need their shapes alone.

        Workers of later stages may give `step` tensors on the meta device, and so read no data.
        """
        return self._engine.reads_inputs

    def step(self, x: Tensor | Inputs, y: Any = None) -> StepLoss:
        """Train on one batch; returns its mean loss, on all workers.

        `x` is a tensor, or a tuple or dict of the arguments of forward; `loss` is called with the output and
        `y`. All workers call it with the same batch, which is compared in the first step unless
        `verify=False`. Only the contents on workers of the first stage are used; `y` travels with the
        microbatches. Microbatches are consecutive samples, and may
        differ by one: microbatch i of m has samples `n * i // m` to `n * (i + 1) // m - 1` of n, and goes to
        replica i modulo their number. A batch that is smaller than an earlier one keeps the size of
        microbatches.

        Under `stash` and `2bw` microbatches may be in flight afterwards; `drain` and all other methods
        complete them. They drain after each step if workers hold several stages.
        """
        samples = samples_of(x)
        self._attributes.check()
        self._inputs.check(x, y, self.reads_inputs)
        self._largest = max(self._largest, samples)
        if self._never_drains and self._largest < self._microbatches:
            raise InputError(
                f"step: found a batch of {samples} samples, fewer than its {self._microbatches} microbatches,"
                f" which this schedule needs to stay full; give larger batches or fewer microbatches"
            )
        microbatches = microbatch_count(samples, self._largest, self._microbatches)
        with keep_random_states(), in_words_of_step():
            share = self._engine.step((x, y), samples, microbatches)
        return StepLoss(share, samples, self.world.world_size > 1)

    def evaluate(self, x: Tensor | Inputs, microbatches: int | None = None) -> Any:
        """The outputs of the model in evaluation mode for the batch `x`, on all workers.

        The batch passes through in microbatches, whose outputs are joined along the first axis; scalars are
        averaged by samples. With `microbatches=1` the batch stays in one.
        """
        samples = samples_of(x)
        # Some models do other things with a single sample.
        count = min(microbatches or self._microbatches, max(1, samples // 2))
        with keep_random_states():
            parts, spec = self._engine.evaluate(x, samples, count)
        sizes = [len(rows) for rows in split(samples, count)]
        leaves = [_joined(list(same), sizes) for same in zip(*parts)]
        return pytree.tree_unflatten(leaves, spec)

    def drain(self) -> None:
        """Complete the microbatches in flight; there are none under schedules that update once a batch."""
        self._engine.drain()

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole model on rank 0, as the plain model's `state_dict`; empty on the others.

        All workers call it. Running statistics of replicas are averaged.
        """
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the plain model, that of rank 0; the others may give an empty one."""
        why = _describe_names(self._expected, state) if self.world.is_first else ""
        if self.world.world_size > 1:
            why = str(broadcast_value(why, 0))
        if why:
            raise InputError(f"load_state_dict: {why}; expected the state_dict of the plain model")
        self._engine.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """The optimizer's state by `parameter name/key` on rank 0; empty on the others.

        Any number of workers, with any stages, can load it.
        """
        return self._engine.optimizer_state()

    def load_optimizer_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `optimizer_state_dict` returned, that of rank 0."""
        self._engine.load_optimizer_state(dict(state))

    def close(self) -> None:
        """Complete what is in flight and leave; all workers call it after the last step."""
        self._engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()


def _check_arguments(
    model: object, loss: object, optimizer: object, microbatches: object, clip_norm: object
) -> None:
    """Refuse what a newcomer gives by mistake."""
    if microbatches is not None and not (isinstance(microbatches, int) and microbatches >= 1):
        raise InputError(f"microbatches: found {shown(microbatches)}, expected at least 1")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise InputError(f"clip_norm: found {shown(clip_norm)}, expected a number above 0, or None")
    if not isinstance(model, nn.Module):
        raise InputError(f"model: found {shown(model)}, expected a torch.nn.Module")
    check_unwrapped("model", model)
    if is_compiled(model):
        raise InputError(
            "model: found one that is compiled already, which cannot be cut into stages; pass the model "
            "itself and compile=True: each stage is then compiled"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model: no parameter requires a gradient, so there is nothing to train")
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"model: {name} has a hook that is called when its gradient was accumulated "
                "(register_post_accumulate_grad_hook), which would see that of each microbatch; remove it, "
                "and let the pipeline update and clip: optimizer=, clip_norm="
            )
    if not callable(loss):
        raise InputError(f"loss: found {shown(loss)}, expected a function of output and target")
    if isinstance(loss, type):
        raise InputError(
            f"loss: found the class {loss.__name__}, expected an object of it: {loss.__name__}()"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError("loss: it has parameters, which would not be trained; put them into the model")
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise InputError(
            f"optimizer: found {shown(optimizer)}, expected a function that makes one for the parameters of "
            f"a stage, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
        )


def _make_optimizer(make: MakeOptimizer, parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer: it returned {shown(optimizer)}, expected a torch.optim.Optimizer, as "
            f"functools.partial(torch.optim.AdamW, lr=1e-3) does"
        )
    set_mode(optimizer, training=True)
    remember_start(optimizer)
    return optimizer


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _describe_names(expected: Mapping[str, tuple[int, ...] | None], state: Mapping[str, Any]) -> str:
    """How the names and shapes of a state differ from those of the model; empty if they do not."""
    for name in {**expected, **state}:
        if name not in state:
            return f"{name!r} is missing"
        if name not in expected:
            return f"the model has no {name!r}"
        if expected[name] != _shape(state[name]):
            return f"{name!r} has shape {_shape(state[name])}, that of the model {expected[name]}"
    return ""


def _joined(parts: list[Any], sizes: Sequence[int]) -> Any:
    """One value of the outputs of all microbatches, which have these numbers of samples."""
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, Tensor):
        return first
    if first.dim() == 0:
        return sum(part * (size / sum(sizes)) for part, size in zip(parts, sizes))
    if [len(part) for part in parts] != list(sizes):
        raise InputError(
            f"evaluate: an output has shape {list(first.shape)} for {sizes[0]} samples, so that those of "
            f"microbatches cannot be joined along the first axis; use evaluate(x, microbatches=1)"
        )
    return torch.cat(parts)
