"""Traits of custom optimizers that matter for training on several workers, found by trying them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from plait.pipeline.named_state import changes_itself, is_known
from plait.verification import RandomState, same_random_numbers

if TYPE_CHECKING:  # workers that trace no model do not import what traces
    from plait.pipeline.layout import PipelineLayout
    from plait.profiler.traced_model import TracedModel

# Makes the optimizer of some parameters, given their names.
BuildOptimizer = Callable[[Sequence[Parameter], Mapping[Tensor, str]], torch.optim.Optimizer]

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


def find_traits(build: BuildOptimizer, named: Mapping[str, Parameter]) -> Traits:
    """The traits of the optimizer that `build` makes, tried out on copies of some parameters `named`."""
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if is_known(build([Parameter(torch.zeros(1, 1))], {})):
        return Traits()
    with same_random_numbers(0):
        chosen = _few(trained)
        names = list(chosen)
        together = [_like(parameter) for parameter in chosen.values()]
        alone = [Parameter(parameter.detach().clone()) for parameter in together]
        try:
            optimizer = build(together, dict(zip(together, names)))
            single = [build([p], {p: name}) for p, name in zip(alone, names)]
            draws, keeps = _take_steps(optimizer, single, [together, alone])
        except Exception:  # it takes all parameters or none, or other gradients; the run says what it is
            return Traits()
    couples = not all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(together, alone))
    return Traits(couples and not draws, draws, changes_itself(optimizer), keeps)


def objection_where_summed(kind: str, traits: Traits) -> str:
    """Why the optimizer `kind` cannot train where workers sum their gradients; empty if it can."""
    if not traits.keeps:
        return ""
    return (
        f"zero_grad of {kind} leaves gradients for the next step, but where workers sum gradients each step "
        f"begins with none; use one worker, accumulate, or keep what it needs in its state"
    )


def objection_in_stages(
    kind: str, traits: Traits, traced: TracedModel, pipeline_layout: PipelineLayout
) -> str:
    """Why updates of the optimizer `kind` in stages would differ from those on one worker; empty if not."""
    if why := objection_where_summed(kind, traits):
        return why
    several, schedule = len(pipeline_layout.stages) > 1, pipeline_layout.schedule
    if traits.couples and several:
        return (
            f"{kind} computes an update from all parameters together (a norm over all, say), and a stage has "
            f"only some; use one stage (plan: data-parallel), or, for a limit on the norm, clip_norm, which "
            f"is that of all stages under the schedules that drain"
        )
    if traits.draws and several:
        return (
            f"{kind} draws random numbers for one parameter after the other; a stage, which has only some, "
            f"would draw others than one worker does; use one stage (plan: data-parallel)"
        )
    from plait.pipeline.gradient_sync import find_stages

    tied = any(len(stages) > 1 for stages in find_stages(traced, pipeline_layout).values())
    if traits.counts and not schedule.synchronous and (pipeline_layout.shared or tied):
        return (
            f"{kind} counts its updates (in its groups or attributes), and under schedule {schedule.value} a "
            f"worker with several stages, or with tied weights, updates several times a batch; use schedule "
            f"flush"
        )
    return ""


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
