"""The audit of a training step: compares it with the same step of plain PyTorch.

Two comparisons are made from the run's state: forward and backward of the whole model, which give the
gradients, and the optimizer's update with these gradients (`reference_optimizer.py`). Only differences beyond
rounding are reported; if there are any, the rounding error is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.verification.attributes import same_plain, shifted
from plait.verification.compare import (
    Difference,
    Noise,
    dense,
    find_differences,
    measure_noise,
    perturb_in_place,
)
from plait.verification.observe import Observation, unchanged_random_numbers
from plait.verification.reference_optimizer import OptimizerTwin
from plait.verification.replay import Named, Part, PlainModel, State

# Gradients are summed in chunks of this many elements.
_SUMMED = 1 << 22
_LEARNT = 1e-3
# An attribute matters if adding one of these to its numbers changes the loss, or if it affects the losses of
# as many consecutive forwards.
_PROBES = (*range(-12, 13), 1000)
_FORWARDS = 8

# Turns a worker's loss and gradients into those that the optimizer uses: sums them over workers, unscales,
# clips.
Finish = Callable[[Tensor, Sequence[Parameter]], Tensor]


@dataclass
class ObservedStep:
    """The result of a step: loss, the gradients for the optimizer, buffers and attributes after forward.

    `written` are the parameters that forward wrote.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    written: Mapping[str, Tensor] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> Observation:
        # Losses are summed in float64, whatever their dtype.
        wide = any(grad is not None and grad.dtype == torch.float64 for grad in self.gradients.values())
        loss = self.loss if wide else self.loss.to(torch.float32)
        observation: dict[str, Tensor | None] = {"the loss": loss}
        observation |= {f"the gradient of {name}": grad for name, grad in self.gradients.items()}
        observation |= {f"the buffer {name}": buffer for name, buffer in self.buffers.items()}
        return observation | {
            f"the parameter {name}, written by forward": w for name, w in self.written.items()
        }


@dataclass
class Rounding:
    """Rounding errors of a run's steps so far, by name, relative to the largest value of the same kind."""

    known: dict[str, float] = field(default_factory=dict)

    def of(self, expected: Observation) -> Noise:
        """The tolerance of a step, estimated from those measured."""
        scales = _scales(expected) if self.known else {}
        return Noise(
            {name: self.known[name] * scales[_kind(name)] for name in expected if name in self.known}
        )

    def learn(self, expected: Observation, noise: Noise) -> None:
        """Record measured rounding errors, except large ones, which are measured each time."""
        scales = _scales(expected)
        for name, allowed in noise.allowed.items():
            scale = scales.get(_kind(name), 0.0)
            if 0.0 < allowed <= _LEARNT * scale:
                self.known[name] = max(self.known.get(name, 0.0), allowed / scale)


class Replay:
    """The step of plain PyTorch, which can be repeated from the state `before`.

    Before the first step of a run (`is_first`), that state must equal the initial one of `plain`. If several
    workers sum in `finish`, all of them call each method together.
    """

    def __init__(
        self,
        plain: PlainModel,
        before: State,
        parts: Sequence[Part],
        finish: Finish,
        is_first: bool = False,
    ) -> None:
        self._plain = plain
        self._made = plain.state().attributes.values if is_first else {}
        self._before = before
        self._parts = parts
        self._finish = finish
        self._expected = self._take()

    def compare(
        self,
        step: ObservedStep,
        rounding: Rounding,
        harmless: set[str],
        any_differs: Callable[[bool], bool] = bool,
    ) -> tuple[float, list[Difference]]:
        """The largest difference to the run's step, and the differences beyond rounding.

        The rounding error is measured, from perturbed weights, if the known one is not enough on any worker,
        which `any_differs` determines. Differing Python attributes are reported only if forward depends on
        them; the names of others are added to `harmless`.
        """
        # A parameter that forward wrote may be unchanged, or changed only by rounding.
        kept = {name: self._before.tensors[name] for name in {**step.written, **self._expected.written}}
        expected = replace(self._expected, written={**kept, **self._expected.written}).tensors()
        observation = replace(step, written={**kept, **step.written}).tensors()
        differences = find_differences(expected, observation, rounding.of(expected))
        if any_differs(bool(differences)):
            noise = measure_noise(expected, lambda seed: self._take(seed).tensors())
            rounding.learn(expected, noise)
            differences = find_differences(expected, observation, noise)
        return largest_difference(expected, observation), [*differences, *self._attributes(step, harmless)]

    def _attributes(self, step: ObservedStep, harmless: set[str]) -> list[Difference]:
        """Python attributes that differ from those of plain PyTorch, and on which forward depends."""
        differences = self._unlike(step.attributes, self._expected.attributes, harmless, "in plain PyTorch")
        here = self._before.attributes.values
        return differences + self._unlike(here, self._made, harmless, "in a newly built model")

    def _unlike(
        self, here: Mapping[str, Any], expected: Mapping[str, Any], harmless: set[str], where: str
    ) -> list[Difference]:
        differences = []
        for name, plainly in expected.items():
            if name in harmless or name not in here or same_plain(plainly, here[name]):
                continue
            if not self._matters(name, here[name], plainly):
                harmless.add(name)
                continue
            label = name if " in " in name else f"the attribute {name}"
            why = f"{_shown(here[name])}, but {_shown(plainly)} {where}"
            differences.append(Difference(f"{label}, which forward changes", why))
        return differences

    def _take(self, seed: int | None = None) -> ObservedStep:
        """Take the step; with a `seed`, from perturbed weights."""
        self._plain.load(self._before)
        parameters = self._plain.parameters()
        if seed is not None:
            perturb_in_place(parameters.values(), seed)
        with unchanged_random_numbers():
            loss = self._plain.step(self._parts)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        loss = self._finish(loss, list(trained.values()))
        gradients = {name: None if p.grad is None else dense(p.grad).clone() for name, p in trained.items()}
        state = self._plain.state()
        return ObservedStep(
            loss,
            gradients,
            {name: buffer.detach().clone() for name, buffer in self._plain.buffers_left().items()},
            changed_tensors({name: self._before.tensors[name] for name in parameters}, parameters),
            state.attributes.values,
        )

    def _matters(self, name: str, here: Any, plainly: Any) -> bool:
        """Whether the loss depends on an attribute: on its two values, or on shifted ones."""
        if self._losses_with(name, here, _FORWARDS) != self._losses_with(name, plainly, _FORWARDS):
            return True
        values = [shifted(plainly, offset) for offset in _PROBES]
        return len({self._losses_with(name, value) for value in values}) > 1

    def _losses_with(self, name: str, value: Any, forwards: int = 1) -> str:
        attributes = replace(self._before.attributes, values={**self._before.attributes.values, name: value})
        self._plain.load(replace(self._before, attributes=attributes))
        try:
            with unchanged_random_numbers():
                return repr([float(self._plain.step(self._parts[:1])) for _ in range(forwards)])
        except Exception as failure:  # the user's code can raise anything
            return repr(failure)


def observe_live(live: PlainModel, before: State, twin: OptimizerTwin, loss: Tensor) -> ObservedStep:
    """The result of a step that a model with an optimizer has taken from the state `before`."""
    state = live.state()
    frozen = {name: state.tensors[name] for name in live.parameters() if name not in twin.gradients}
    return ObservedStep(
        loss,
        twin.gradients,
        {name: state.tensors[name] for name in live.buffers()},
        {**changed_tensors(before.tensors, frozen), **twin.written},
        state.attributes.values,
    )


def changed_tensors(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Named:
    """Copies of the tensors that have changed."""
    return {name: t.detach().clone() for name, t in now.items() if not _equal(before[name], t.detach())}


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one, other, 0.0, 0.0, equal_nan=True).all())


def largest_difference(expected: Observation, found: Observation) -> float:
    """The largest difference, relative to the largest value of the same kind (losses, gradients, ...)."""
    apart: dict[str, float] = {}
    for name, value in expected.items():
        other = found.get(name)
        if value is None or other is None or value.shape != other.shape or not value.is_floating_point():
            continue
        if not torch.equal(value, other := other.to(value.device)):
            apart[_kind(name)] = max(apart.get(_kind(name), 0.0), _largest(value - other))
    scales = _scales(expected) if apart else {}
    return max((amount / (scales[kind] or 1.0) for kind, amount in apart.items()), default=0.0)


def _scales(observed: Observation) -> dict[str, float]:
    """The largest value of each kind (gradients, buffers, ...)."""
    scales: dict[str, float] = {}
    for name, value in observed.items():
        if value is not None and value.is_floating_point():
            scales[_kind(name)] = max(scales.get(_kind(name), 0.0), _largest(value))
    return scales


def _kind(name: str) -> str:
    return " ".join(name.split()[:2])


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _shown(plain: Any) -> str:
    text = str(plain[1] if isinstance(plain, list) else plain)
    return text if len(text) <= 60 else f"{text[:60]}..."


def sum_over_workers(
    loss: Tensor, parameters: Sequence[Parameter], group: dist.ProcessGroup | None = None
) -> Tensor:
    """The loss summed over workers; gradients are summed in place, and stay None if no worker has one."""
    has = [float(parameter.grad is not None) for parameter in parameters]
    counts = torch.cat([loss.reshape(1), torch.tensor(has, dtype=torch.float64)])
    dist.all_reduce(counts, group=group)
    used = [p for p, count in zip(parameters, counts[1:].tolist()) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad = dense(parameter.grad)
    for chunk in _chunks([p.grad for p in used if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in chunk])
        dist.all_reduce(flat, group=group)
        for grad, summed in zip(chunk, flat.split([grad.numel() for grad in chunk])):
            grad.copy_(summed.view_as(grad))
    return counts[0]


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, in chunks of limited size."""
    chunk: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if chunk and (chunk[0].dtype != tensor.dtype or elements > _SUMMED):
            yield chunk
            chunk, elements = [], 0
        chunk.append(tensor)
        elements += tensor.numel()
    if chunk:
        yield chunk
