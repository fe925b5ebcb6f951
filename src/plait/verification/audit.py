"""The audit of a step: what a run has just done, against the same step taken by plain PyTorch.

Two comparisons, each from the state that the run had: forward and backward of the whole model, which give the
gradients, and the optimizer's update by these gradients (`twin.py`). A difference counts beyond rounding,
which is measured where there is one.
"""

from __future__ import annotations

import math
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
from plait.verification.replay import Named, Part, PlainModel, State

# Gradients are summed in pieces of this many elements.
_SUMMED = 1 << 22
_LEARNT = 1e-3
# What forward keeps matters if one of these, added to its numbers, changes the loss, or if the losses of so
# many forwards, one after the other, go by it.
_PROBES = (*range(-12, 13), 1000)
_FORWARDS = 8

# Makes of a worker's loss and gradients those of the step, which the optimizer takes: sums them over workers,
# takes a loss scale out, clips.
Finish = Callable[[Tensor, Sequence[Parameter]], Tensor]


@dataclass
class ObservedStep:
    """What a step did: its loss, the gradients that the optimizer takes, and what forward left behind.

    `written` are parameters that forward wrote.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    written: Mapping[str, Tensor] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> Observation:
        # Losses are summed in float64, whatever they were computed in.
        wide = any(grad is not None and grad.dtype == torch.float64 for grad in self.gradients.values())
        loss = self.loss if wide else self.loss.to(torch.float32)
        found: dict[str, Tensor | None] = {"the loss": loss}
        found |= {f"the gradient of {name}": grad for name, grad in self.gradients.items()}
        found |= {f"the buffer {name}": buffer for name, buffer in self.buffers.items()}
        return found | {f"the parameter {name}, written by forward": w for name, w in self.written.items()}


@dataclass
class Rounding:
    """How far rounding took the steps of a run so far, by name, relative to the largest value of its kind."""

    known: dict[str, float] = field(default_factory=dict)

    def of(self, expected: Observation) -> Noise:
        """What rounding explains in a step that is like those measured."""
        scales = _scales(expected) if self.known else {}
        return Noise(
            {name: self.known[name] * scales[_kind(name)] for name in expected if name in self.known}
        )

    def learn(self, expected: Observation, noise: Noise) -> None:
        """Take down what was measured, but for what rounding changes a lot, which is measured each time."""
        scales = _scales(expected)
        for name, allowed in noise.allowed.items():
            scale = scales.get(_kind(name), 0.0)
            if 0.0 < allowed <= _LEARNT * scale:
                self.known[name] = max(self.known.get(name, 0.0), allowed / scale)


class Replay:
    """The step of plain PyTorch, taken from the state `before` as often as needed.

    Before the first step of a run (`is_first`), that state must be the one that `plain` was made with. Where
    several workers sum in `finish`, all of them call each method together.
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
        found: ObservedStep,
        rounding: Rounding,
        harmless: set[str],
        any_differs: Callable[[bool], bool] = bool,
    ) -> tuple[float, list[Difference]]:
        """The largest difference of what the run did, and where it did something else than rounding explains.

        What rounding explains is measured, from weights rounded otherwise, where what is known of it does not
        suffice for one of the workers, which `any_differs` asks. What the run leaves in Python counts where
        forward goes by it; the names of what it does not go by are added to `harmless`.
        """
        # What forward writes may be equal to what was there, or a rounding away from it.
        kept = {name: self._before.tensors[name] for name in {**found.written, **self._expected.written}}
        expected = replace(self._expected, written={**kept, **self._expected.written}).tensors()
        own = replace(found, written={**kept, **found.written}).tensors()
        differences = find_differences(expected, own, rounding.of(expected))
        if any_differs(bool(differences)):
            noise = measure_noise(expected, lambda seed: self._take(seed).tensors())
            rounding.learn(expected, noise)
            differences = find_differences(expected, own, noise)
        return largest_difference(expected, own), [*differences, *self._attributes(found, harmless)]

    def _attributes(self, found: ObservedStep, harmless: set[str]) -> list[Difference]:
        """What the run leaves in Python other than plain PyTorch does, and by which forward goes."""
        differences = self._unlike(found.attributes, self._expected.attributes, harmless, "in plain PyTorch")
        here = self._before.attributes.values
        return differences + self._unlike(here, self._made, harmless, "in a model made anew")

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
            shown = name if " in " in name else f"the attribute {name}"
            why = f"{_shown(here[name])}, but {_shown(plainly)} {where}"
            differences.append(Difference(f"{shown}, which forward changes", math.inf, 0.0, why))
        return differences

    def _take(self, seed: int | None = None) -> ObservedStep:
        """Take the step; with a `seed` from weights that are rounded otherwise."""
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
        """Whether the loss goes by an attribute: by what it is here or in plain PyTorch, or will become."""
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
        except Exception as failure:  # a user's code may fail in any way
            return repr(failure)


def changed_tensors(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Named:
    """Copies of the tensors that are not what they were."""
    return {name: t.detach().clone() for name, t in now.items() if not _equal(before[name], t.detach())}


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one, other, 0.0, 0.0, equal_nan=True).all())


def largest_difference(expected: Observation, found: Observation) -> float:
    """The largest difference of losses, of gradients, ..., relative to the largest value of its kind."""
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
    """The largest value of each kind: of gradients, of buffers, ..."""
    found: dict[str, float] = {}
    for name, value in observed.items():
        if value is not None and value.is_floating_point():
            found[_kind(name)] = max(found.get(_kind(name), 0.0), _largest(value))
    return found


def _kind(name: str) -> str:
    return " ".join(name.split()[:2])


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _shown(plain: Any) -> str:
    text = str(plain[1] if isinstance(plain, list) else plain)
    return text if len(text) <= 60 else f"{text[:60]}..."


def sum_over_workers(loss: Tensor, parameters: Sequence[Parameter]) -> Tensor:
    """The sum of the loss; gradients are summed in place, and one that no worker has stays None."""
    has = [float(parameter.grad is not None) for parameter in parameters]
    counts = torch.cat([loss.reshape(1), torch.tensor(has, dtype=torch.float64)])
    dist.all_reduce(counts)
    used = [p for p, count in zip(parameters, counts[1:].tolist()) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad = dense(parameter.grad)
    for piece in _pieces([p.grad for p in used if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in piece])
        dist.all_reduce(flat)
        for grad, summed in zip(piece, flat.split([grad.numel() for grad in piece])):
            grad.copy_(summed.view_as(grad))
    return counts[0]


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type in a row, of which few are copied at a time."""
    piece: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if piece and (piece[0].dtype != tensor.dtype or elements > _SUMMED):
            yield piece
            piece, elements = [], 0
        piece.append(tensor)
        elements += tensor.numel()
    if piece:
        yield piece
