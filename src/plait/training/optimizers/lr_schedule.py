"""Learning rates as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.core.errors import JobError
from plait.core.names import check_arguments, did_you_mean, resolve
from plait.pipeline.named_state import LR_FACTOR, note_rate
from plait.schema.settings import LrScheduleSettings
from plait.verification.python_state import changed_by, unchanged_state

LrFactor = Callable[[int], float]


def set_lr(optimizer: torch.optim.Optimizer, base_lrs: Sequence[float], factor: float) -> None:
    """Give each parameter group its own learning rate times `factor`.

    While the factor stays the same, so do the rates, or what the optimizer itself makes of them.
    """
    if vars(optimizer).get(LR_FACTOR, 1.0) == factor:
        return
    vars(optimizer)[LR_FACTOR] = factor
    for group, base in zip(optimizer.param_groups, base_lrs):
        group["lr"] = base * factor
    note_rate(optimizer)


def constant(step: int, total: int) -> float:
    """The same factor throughout."""
    return 1.0


def step(step: int, total: int, every_steps: int, gamma: float = 0.1) -> float:
    """`gamma` times smaller after every `every_steps` steps."""
    return float(gamma ** (step // every_steps))


def polynomial(step: int, total: int, power: float = 1.0, end_factor: float = 0.0) -> float:
    """From 1 down to `end_factor` at the last step, along (1 - progress) ** power."""
    left = 1.0 - min(step / max(total, 1), 1.0)
    return float(end_factor + (1.0 - end_factor) * left**power)


def cosine(step: int, total: int, end_factor: float = 0.0) -> float:
    """From 1 down to `end_factor` at the last step, along half a cosine."""
    progress = min(step / max(total, 1), 1.0)
    return end_factor + (1.0 - end_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


LR_SCHEDULES: Mapping[str, Callable[..., float]] = {
    "constant": constant,
    "step": step,
    "polynomial": polynomial,
    "cosine": cosine,
}


def check_lr_schedule(settings: LrScheduleSettings) -> None:
    """Refuse a schedule that does not exist, takes other options, or fails on those it was given."""
    factor = build_lr_factor(settings, settings.warmup_steps + 1)
    custom = resolve(settings.kind, "lr_schedule.kind", JobError) if ":" in settings.kind else None
    try:
        with unchanged_state({"schedule": custom}):
            factor(settings.warmup_steps)
            kept = changed_by(lambda: factor(settings.warmup_steps), {"schedule": custom})
    except Exception as failure:  # a user's own schedule may fail in any way
        message = f"{type(failure).__name__}: {failure}"
        raise JobError(f"lr_schedule: {settings.kind} refused {dict(settings.options)}: {message}") from None
    if kept:
        raise JobError(
            f"lr_schedule.kind: {settings.kind} changes {kept[0][1]} whenever it is called, which is more "
            f"than once a step, and no checkpoint holds it; expected a function of step and total alone"
        )


def build_lr_factor(settings: LrScheduleSettings, total_steps: int) -> LrFactor:
    """The factor on the learning rate at each step: a linear warm-up, then the schedule over what is left.

    A function of the step alone, so a resumed run needs no schedule state.
    """
    kind, warmup = settings.kind, settings.warmup_steps
    if ":" in kind:
        shape = resolve(kind, "lr_schedule.kind", JobError)
    elif kind in LR_SCHEDULES:
        shape = LR_SCHEDULES[kind]
    else:
        hint = did_you_mean(kind, LR_SCHEDULES)
        raise JobError(f"lr_schedule.kind: found {kind!r}, expected a schedule's name{hint}")
    check_arguments(
        shape, settings.options, "lr_schedule", JobError, positional=2, reserved=("warmup_steps",)
    )
    options: dict[str, Any] = dict(settings.options)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return float(shape(step - warmup, total_steps - warmup, **options))

    return factor
