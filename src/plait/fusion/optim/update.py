"""One update of the parameters of a group, for all trials: at once, or by torch's kernels trial by trial."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fusion.dispatch.per_trial import of_trials
from plait.fusion.kernels import can_run_on
from plait.fusion.optim.param_groups import FusedGroup
from plait.fusion.optim.step_clock import StepClock, distinct
from plait.sync.weight_ema import EMA

_WHOLE = (torch.float32, torch.float64)
# The most elements of a parameter that is updated together with others; on a GPU, a pass over as many takes
# about as long as a launch.
_SMALL = {False: 2**14, True: 2**20}
# The strides of the parameters, and per-trial views of them and of what a kernel takes besides.
Slices = tuple[list[tuple[int, ...]], list[list[tuple[Tensor, ...]]]]
# Those of each group, by its id, with what they are views of.
KnownSlices = dict[int, tuple[Any, Slices]]
# A parameter to update, its gradient, its states by name, and its step counts.
Updated = tuple[Tensor, Tensor, dict[str, Tensor], StepClock]


class Stepping(NamedTuple):
    """Which trials take a step: those `moving` (None: all), neither `finished` nor marked by `skip`."""

    moving: Tensor | None
    skip: Tensor | None
    finished: Sequence[int]


def update_group(
    group: FusedGroup,
    updated: Sequence[Updated],
    absent: Sequence[tuple[int, ...]],
    stepping: Stepping,
    ema: Tensor | None,
    known: KnownSlices,
) -> None:
    """Update parameters of a group, their states, step counts and moving averages.

    Of each, the trials that are `absent` have no gradient, and do not change.
    """
    kept = _of_absent(updated, absent) if any(absent) else []
    parameters = [parameter for parameter, *_ in updated]
    clocks = distinct([clock for *_, clock in updated])
    by_kernel = _has_kernel(group, parameters) and not _in_one_pass(group, parameters)
    if not by_kernel:
        _at_once(group, updated, clocks, stepping.moving)
    for clock in clocks:
        clock.advance(stepping.moving, group.vectors)
    if by_kernel:
        _by_kernel(group, updated, stepping, _slices_of(group, updated, known))
    if ema is not None:
        _update_ema(updated, ema, stepping.moving)
    for tensor, trials, before in kept:
        tensor[trials] = before


def _of_absent(
    updated: Sequence[Updated], absent: Sequence[tuple[int, ...]]
) -> list[tuple[Tensor, list[int], Tensor]]:
    """Copies of what must not change: parameters, states and clocks of trials without a gradient."""
    tensors = {
        id(tensor): (tensor, list(trials))
        for (parameter, _, state, clock), trials in zip(updated, absent)
        if trials
        for tensor in (parameter, *state.values(), *clock.rows)
    }
    return [(tensor, trials, tensor[trials].clone()) for tensor, trials in tensors.values()]


def _by_kernel(group: FusedGroup, updated: Sequence[Updated], stepping: Stepping, slices: Slices) -> None:
    """Step trial by trial with torch's fused kernels, each in one pass over memory."""
    kernel, options = group.kind.kernel, {**group.switches, "maximize": False, "found_inf": None}
    assert kernel is not None
    orders, (parameters, *states) = slices
    gradients = [
        (g if g.stride() == order else _ordered_as(p, g)).unbind()
        for (p, g, _, _), order in zip(updated, orders)
    ]
    rates: Any = group.numbers["lr"]
    if group.device.type == "cuda":
        rates = group.vectors["lr"].to(torch.float32).unbind()
    infs = None if stepping.skip is None else stepping.skip.to(torch.float32).unbind()
    for trial in range(group.trials):
        if trial in stepping.finished:
            continue
        lists = [[part[trial] for part in parts] for parts in (parameters, gradients, *states)]
        options |= {name: values[trial] for name, values in group.numbers.items()}
        options["lr"], options["found_inf"] = rates[trial], None if infs is None else infs[trial]
        kernel(*lists, **options)


def _ordered_as(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` in the layout of a parameter: torch's kernels read both in the order of memory."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter).copy_(value)


def _slices_of(group: FusedGroup, updated: Sequence[Updated], known: KnownSlices) -> Slices:
    """Each trial's views of parameters, states and steps; `known` while the tensors do not change."""
    key = [(p.data_ptr(), *map(id, (clock, *state.values()))) for p, _, state, clock in updated]
    if id(group) not in known or known[id(group)][0] != key:
        for parameter, _, state, _ in updated:
            for value in state.values():
                if value.shape == parameter.shape:
                    value.data = _ordered_as(parameter, value)
        steps = {id(clock): clock.steps.unbind() for *_, clock in updated}
        slices = [[parameter.detach().unbind() for parameter, *_ in updated]]
        for name in group.kind.kernel_states:
            of_steps = [steps[id(clock)] for *_, clock in updated] if name == "step" else []
            slices.append(of_steps or [state[name].unbind() for _, _, state, _ in updated if name in state])
        known[id(group)] = (key, ([parameter.stride() for parameter, *_ in updated], slices))
    return known[id(group)][1]


def _has_kernel(group: FusedGroup, parameters: Iterable[Tensor]) -> bool:
    # On the CPU torch's kernels do not change bfloat16 parameters (seen with 2.13); on a GPU they take
    # learning rates in float32, which is too coarse for float64.
    kinds = {p.dtype for p in parameters}
    whole = torch.float64 not in kinds if group.device.type == "cuda" else kinds.issubset(_WHOLE)
    whole = whole and not any(kind.is_complex for kind in kinds)
    return group.kind.kernel is not None and whole and not any(group.numbers.get("dampening", ()))


def _in_one_pass(group: FusedGroup, parameters: Iterable[Tensor]) -> bool:
    """Whether one of our kernels can update all trials of a parameter at once."""
    known = group.kind.one_pass is not None and not group.get("amsgrad", False)
    return known and all(p.dtype == torch.float32 and can_run_on(p) for p in parameters)


def _at_once(
    group: FusedGroup, updated: Sequence[Updated], clocks: Iterable[StepClock], moving: Tensor | None
) -> None:
    """Step all trials at once, with coefficients broadcast over each parameter, or by one of our kernels."""
    parameters = [parameter for parameter, *_ in updated]
    precision = torch.float32
    for dtype in {parameter.dtype.to_real() for parameter in parameters}:
        precision = torch.promote_types(precision, dtype)
    tables = {id(clock): _coefficients(group, clock, moving, precision) for clock in clocks}
    if (one_pass := group.kind.one_pass) and _in_one_pass(group, parameters):
        for clock in clocks:
            of_clock = ((p, _of_active(g, moving), state) for p, g, state, own in updated if own is clock)
            one_pass(of_clock, tables[id(clock)].rows, group.switches)
        return
    alike: dict[Any, list[Updated]] = {}
    for p, g, state, clock in updated:
        key: Any = (p.shape, p.dtype, id(clock))
        if p.numel() > _SMALL[p.is_cuda]:
            key = (*key, id(p))
        state = {name: value for name, value in state.items() if name != EMA}
        if p.is_complex():  # as in torch: real and imaginary parts separately
            p, g = torch.view_as_real(p), torch.view_as_real(g)
            state = {name: torch.view_as_real(value) for name, value in state.items()}
        alike.setdefault(key, []).append((p, g, state, clock))
    for members in alike.values():
        _update_alike(group, members, tables[id(members[0][-1])], moving)


class _Coefficients(NamedTuple):
    """The coefficients of a step by name: a row each, with a column per trial."""

    names: Sequence[str]
    rows: Tensor


def _coefficients(
    group: FusedGroup, clock: StepClock, moving: Tensor | None, precision: torch.dtype
) -> _Coefficients:
    """The coefficients of this step.

    Computed once for all parameters that share a clock, and cast as one tensor, as each launch on these few
    numbers takes as long as one on a small weight.
    """
    values = group.kind.coefficients(group.vectors, clock)
    rows = torch.stack(list(values.values())).to(precision)
    if moving is not None:
        # Coefficients that leave a trial unchanged; made without a copy from the host, which a CUDA graph
        # cannot contain.
        kept = torch.zeros_like(rows[:, :1])
        for row, name in enumerate(values):
            if name in group.kind.keeping:
                kept[row].fill_(1.0)
        rows = torch.where(moving, rows, kept)
    return _Coefficients(list(values), rows)


def _update_alike(
    group: FusedGroup, members: Sequence[Updated], coefficients: _Coefficients, moving: Tensor | None
) -> None:
    """Update parameters of one shape as one with more trials: on small ones, launches take all the time."""
    parameter, gradient, state, *_ = members[0]
    rows = coefficients.rows
    if (count := len(members)) > 1:
        parameter, gradient = torch.cat([p for p, *_ in members]), torch.cat([g for _, g, *_ in members])
        state = {name: torch.cat([own[name] for _, _, own, _ in members]) for name in state}
        rows, moving = rows.repeat(1, count), None if moving is None else moving.repeat(count)
    each = rows.view(*rows.shape, *(1,) * (parameter.dim() - 1)).unbind()
    by_name = dict(zip(coefficients.names, each, strict=True))
    group.kind.update(parameter, _of_active(gradient, moving), state, by_name, group.switches)
    if count > 1:
        torch._foreach_copy_([own for own, *_ in members], parameter.chunk(count))
        for name, value in state.items():
            torch._foreach_copy_([own[name] for _, _, own, _ in members], value.chunk(count))


def _of_active(gradient: Tensor, active: Tensor | None) -> Tensor:
    """The gradient, zero (not NaN) for trials that are skipped."""
    if active is None:
        return gradient
    kept: Tensor = torch.where(of_trials(active, gradient), gradient, 0.0)
    return kept


def _update_ema(updated: Sequence[Updated], decays: Tensor, moving: Tensor | None) -> None:
    """Move the averages towards the weights, by one minus the decay of each trial; of those that moved."""
    for parameter, _, state, *_ in updated:
        weights = (1.0 - decays).to(parameter.device, parameter.dtype.to_real())
        weights = weights if moving is None else torch.where(moving, weights, 0.0)
        state[EMA].lerp_(parameter.detach(), of_trials(weights, parameter))
