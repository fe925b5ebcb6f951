"""Runs the stages of a model one after the other in one process, each on its own copy of the weights.

It does what the workers of a pipeline do with one microbatch, using the same runners: values are detached
between stages, gradients are passed back, and tied weights of two stages are two copies.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.data.call_model import evaluation_mode
from plait.pipeline.cpu.layers import use_fast_layers
from plait.pipeline.cutting.cut import StageModule, cut, evaluation_stages
from plait.pipeline.cutting.edges import StageEdge, find_routes
from plait.pipeline.stage import Autocast, InFlight, Loss, LossOf, StageRunner, ordered_inputs
from plait.profiler.traced_model import TracedModel
from plait.verification import (
    BUFFER,
    GRADIENT,
    Observation,
    RandomState,
    copied_gradient,
    first_names,
    observe_outputs,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Choices:
    """How stages run: which recompute activations, whether backward is split and fast layers are used."""

    autocast: Autocast = contextlib.nullcontext
    recompute: Collection[int] = ()
    split: bool = False
    quick: bool = True


class StagedModel:
    """Copies of the stages of `traced`, with the model's current state; the model is not changed.

    `fresh` builds another model with the same state, if the model cannot be copied.
    """

    def __init__(
        self,
        traced: TracedModel,
        stages: Sequence[Sequence[str]],
        loss: Loss,
        choices: Choices,
        fresh: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.stages = [_copied_stage(traced, ids, fresh) for ids in stages]
        self.modules = [stage.module for stage in self.stages]
        on_cpu = all(p.device.type == "cpu" for module in self.modules for p in module.parameters())
        if choices.quick and on_cpu:
            for module in self.modules:
                use_fast_layers(module, add=not choices.split, transpose=False)
        self._traced = traced
        self._evaluated, ids_evaluated = evaluation_stages(traced, stages)
        self._routes = find_routes(traced, stages)
        self._evaluated_routes = find_routes(self._evaluated, ids_evaluated)
        self._states = [_StartingPoint() for _ in stages]
        last = len(stages) - 1
        self._runners = [
            StageRunner(
                stage,
                (),
                LossOf(traced, loss) if number == last else None,
                choices.autocast,
                number in choices.recompute,
                choices.split,
                seed=lambda _, state=self._states[number]: state.start(),  # type: ignore[misc]
            )
            for number, stage in enumerate(self.stages)
        ]

    def step(self, inputs: Any, target: Any) -> tuple[Any, Tensor]:
        """The model's output and loss; gradients are accumulated in the stages."""
        flights = self._forward(inputs, target)
        last = flights[-1]
        assert last.loss is not None
        values = {**last.inputs, **last.outputs}
        output = self._traced.rebuild_output({n: values[n].detach() for n in self._traced.outputs})
        loss = last.loss.detach().clone()
        self._backward(flights)
        return output, loss

    def _forward(self, inputs: Any, target: Any) -> list[InFlight]:
        for state in self._states:
            state.forget()
        tensors = ordered_inputs(self._traced, inputs)
        values: dict[str, Tensor] = dict(zip(self._traced.inputs, tensors, strict=True))
        flights = []
        for number, runner in enumerate(self._runners):
            flight = InFlight(_received(number, self._routes, values, self._traced), 0, (), target)
            runner.forward(flight)
            values |= flight.outputs
            flights.append(flight)
        return flights

    def _backward(self, flights: Sequence[InFlight]) -> None:
        grads: dict[str, Tensor] = {}
        for number in reversed(range(len(flights))):
            runner, flight = self._runners[number], flights[number]
            flight.free_outputs()
            output_grads = {
                value.name: grads[value.name] for value in runner.stage.outputs if value.name in grads
            }
            runner.backward(flight, output_grads)
            if flight.deferred is not None:
                runner.own_gradients(flight, ())
                runner.backward_weight(flight)
            for route in self._routes:
                if route.target != number:
                    continue
                for name in route.grad_names:
                    grad = flight.inputs[name].grad
                    if grad is not None:
                        grads[name] = grads[name] + grad if name in grads else grad

    def evaluate(self, inputs: Any) -> Any:
        """The model's output in evaluation mode."""
        tensors = ordered_inputs(self._evaluated, inputs)
        values: dict[str, Tensor] = dict(zip(self._evaluated.inputs, tensors, strict=True))
        with contextlib.ExitStack() as modes:
            for module in self.modules:
                modes.enter_context(evaluation_mode(module))
            for number, runner in enumerate(self._runners):
                received = _received(number, self._evaluated_routes, values, self._evaluated)
                flight = InFlight(received, 0, ())
                runner.evaluate(flight)
                values |= flight.outputs
        return self._evaluated.rebuild_output(values)

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of each parameter by its first name, summed over the stages that hold it."""
        summed: dict[str, Tensor | None] = {}
        for stage in self.stages:
            seen: set[int] = set()
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                first = stage.first_names[name]
                before, grad = summed.get(first), parameter.grad
                together = before + grad if before is not None and grad is not None else before
                summed[first] = grad if before is None else together
        return summed

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """Each buffer of the model, with the stage that holds it."""
        for number, module in enumerate(self.modules):
            for name, buffer in module.named_buffers():
                yield number, name, buffer

    @property
    def model(self) -> nn.Module:
        """The model that the stages were cut from, in its initial state."""
        return self._traced.model

    def drop_gradients(self) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None


def observe_staged(
    staged: StagedModel, expected: Observation, inputs: Any, target: Any, loss: Loss | None
) -> Observation:
    """What `verification.observe_step` observes of the plain model, observed of its stages.

    Correct stages give `expected`. Without a loss, the stages are evaluated.
    """
    staged.drop_gradients()
    observation: dict[str, Tensor | None] = {}
    if loss is None:
        observation |= observe_outputs(staged.evaluate(inputs))
    else:
        output, value = staged.step(inputs, target)
        observation |= observe_outputs(output)
        observation["the loss"] = value
        grads = staged.gradients()
        for name, _ in staged.model.named_parameters():
            observation[f"{GRADIENT}{name}"] = copied_gradient(grads.get(name))
    for name, buffer in _held_buffers(staged, expected).items():
        observation[name] = buffer.detach().clone()
    return observation


def _held_buffers(staged: StagedModel, expected: Observation) -> dict[str, Tensor]:
    """The `expected` buffers, with their values in the stages.

    If several stages hold a buffer, a copy that differs from the expected value is preferred. A buffer that
    no stage holds keeps its initial value, as nothing in a pipeline changes it.
    """
    names = first_names(staged.model)
    known = {name: value for name, value in expected.items() if value is not None and name.startswith(BUFFER)}
    held: dict[str, Tensor] = {}
    for _, path, buffer in staged.buffers():
        name = f"{BUFFER}{names.get(path, path)}"
        if name in known and (name not in held or torch.equal(held[name], known[name])):
            held[name] = buffer
    before = {f"{BUFFER}{name}": buffer for name, buffer in staged.model.named_buffers()}
    return {name: value for name in known if (value := held.get(name, before.get(name))) is not None}


def copied(value: T, otherwise: Callable[[], T] | None) -> T:
    """A deep copy, or `otherwise()` if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        if otherwise is None:
            raise
        return otherwise()


def _copied_stage(
    traced: TracedModel, ids: Sequence[str], fresh: Callable[[], nn.Module] | None
) -> StageModule:
    """A stage with its own copy of its modules."""
    stage = cut(traced, ids)

    def rebuilt() -> Any:
        assert fresh is not None
        constants = {name: tensor.detach().clone() for name, tensor in traced.constants.items()}
        return cut(replace(traced, model=fresh(), constants=constants), ids).module

    return replace(stage, module=copied(stage.module, None if fresh is None else rebuilt))


def _received(
    number: int, routes: Sequence[StageEdge], values: Mapping[str, Tensor], traced: TracedModel
) -> dict[str, Tensor]:
    """The inputs of a stage as autograd leaves, as if received from other workers."""
    inputs = {name: values[name] for name in traced.inputs} if number == 0 else {}
    for route in routes:
        if route.target == number:
            for name in route.names:
                leaf = values[name].detach()
                inputs[name] = leaf.requires_grad_() if name in route.grad_names else leaf
    return inputs


@dataclass
class _StartingPoint:
    """The random state at the start of a stage: where the previous stage ended, also when it runs again."""

    _state: RandomState | None = None

    def forget(self) -> None:
        self._state = None

    def start(self) -> None:
        if self._state is None:
            self._state = RandomState.now()
        else:
            self._state.restore()
