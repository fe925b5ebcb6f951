"""Which steps are audited: a function of the step alone, so that a resumed run audits the same ones."""

from __future__ import annotations

from plait.schema.settings import TrainSettings

# Of evaluations that follow each other closely, one in this many steps is followed by an audit.
_APART_STEPS = 200


def is_audited(settings: TrainSettings, step: int, base: int = 2) -> bool:
    """Whether the step after `step` steps is audited.

    Those are steps 1, 2, 4, 8, ... (powers of `base`, where an audit costs more than a step), and the first
    step after evaluations 1, 2, 4, 8, ... and after one in every few hundred steps.
    """
    mode = settings.verify.audit
    if mode == "off":
        return False
    return (mode == "doubling" and _is_power(step + 1, base)) or _follows_evaluation(settings, step)


def next_audited(settings: TrainSettings, step: int, base: int = 2) -> int | None:
    """The first step count from `step` on after which a step is audited; None where none will be."""
    mode, every = settings.verify.audit, settings.evaluate.every_steps
    found = []
    if mode == "doubling":
        power = 1
        while power - 1 < step:
            power *= base
        found.append(power - 1)
    if mode != "off" and every:
        at = max(every, -(-step // every) * every)
        while not _follows_evaluation(settings, at):
            at += every
        found.append(at)
    return min(found, default=None)


def _follows_evaluation(settings: TrainSettings, step: int) -> bool:
    every = settings.evaluate.every_steps
    if not every or step == 0 or step % every:
        return False
    return _is_power(step // every, 2) or step // _APART_STEPS > (step - every) // _APART_STEPS


def _is_power(number: int, base: int) -> bool:
    while number % base == 0:
        number //= base
    return number == 1
