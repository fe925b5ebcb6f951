"""Traits of custom optimizers that matter for training on several workers, found by trying them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from plait.core.errors import JobError
from plait.pipeline.named_state import changes_itself, is_known
from plait.schema.settings import OptimizerSettings
from plait.training.optimizers.build import build_optimizer
from plait.verification import RandomState, same_random_numbers

# Gradients of unlike sizes, one step each, in turn: a limit on their norm may be anywhere, and act later.
_SCALES, _STEPS = (1.0, 1e-3, 1e3), 33


@dataclass(frozen=True)
class Traits:
    """Whether an update depends on all parameters together, on random numbers, or on a count of updates.

    Counts are all values in its groups and attributes that change at a step. An optimizer that `keeps` has a
    custom `zero_grad`, which leaves gradients for the next step.
    """

    couples: bool = False
    draws: bool = False
    counts: bool = False
    keeps: bool = False


def find_traits(settings: OptimizerSettings, named: Mapping[str, Parameter]) -> Traits:
    """The traits of the job's optimizer, tried out on copies of some of the parameters `named`."""
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if is_known(build_optimizer(settings, [Parameter(torch.zeros(1))])):
        return Traits()
    with same_random_numbers(0):
        chosen = _few(trained)
        names = list(chosen)
        together = [_like(parameter) for parameter in chosen.values()]
        alone = [Parameter(parameter.detach().clone()) for parameter in together]
        try:
            optimizer = build_optimizer(settings, together, dict(zip(together, names)))
            single = [build_optimizer(settings, [p], {p: name}) for p, name in zip(alone, names)]
            draws, keeps = _take_steps(optimizer, single, [together, alone])
        except Exception:  # it takes all parameters or none, or other gradients; the run says what it is
            return Traits()
    couples = not all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(together, alone))
    return Traits(couples and not draws, draws, changes_itself(optimizer), keeps)


def check_gradients_left(kind: str, traits: Traits) -> None:
    """Refuse an optimizer whose `zero_grad` leaves gradients, where those of several workers are summed."""
    if traits.keeps:
        raise JobError(
            f"optimizer.kind: zero_grad of {kind} leaves gradients for the next step, but where "
            f"workers sum gradients each step begins with none; use one worker, accumulate, or keep what it "
            f"needs in its state"
        )


def _take_steps(
    optimizer: torch.optim.Optimizer,
    single: Sequence[torch.optim.Optimizer],
    sides: Sequence[Sequence[Parameter]],
) -> tuple[bool, bool]:
    """Let one optimizer of all parameters, and one of each, take the same steps.

    Whether the first has drawn random numbers, and whether its zero_grad has left gradients.
    """
    draws = keeps = False
    for number in range(_STEPS):
        _give_gradients(sides, number, _SCALES[number % len(_SCALES)])
        before = RandomState.now()
        optimizer.step()
        draws = draws or not before.equals(RandomState.now())
        optimizer.zero_grad()
        keeps = keeps or any(p.grad is not None and bool(p.grad.any()) for p in sides[0])
        for each in single:
            each.step()
            each.zero_grad()
    return draws, keeps


def _few(named: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The two smallest parameters of each number of dimensions."""
    by_dim: dict[int, list[str]] = {}
    for name, parameter in sorted(named.items(), key=lambda item: item[1].numel()):
        by_dim.setdefault(parameter.dim(), []).append(name)
    return {name: named[name] for names in by_dim.values() for name in names[:2]}


def _like(parameter: Parameter) -> Parameter:
    return Parameter(torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device))


def _give_gradients(sides: Sequence[Iterable[Parameter]], seed: int, scale: float) -> None:
    """The same gradients to the parameters of both sides."""
    for side in sides:
        generator = torch.Generator().manual_seed(seed)
        for parameter in side:
            grad: Tensor = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            parameter.grad = grad.to(parameter.device, parameter.dtype)
