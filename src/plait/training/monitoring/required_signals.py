"""Which signals a job needs."""

from __future__ import annotations

from plait.adapt.policies.registry import needs_norms, needs_signals
from plait.schema.settings import TrainSettings

GRADIENT_MONITORS = ("noise-scale", "variance")


def is_monitored(settings: TrainSettings) -> bool:
    """Whether the job or one of its policies needs signals."""
    return bool(settings.monitor or settings.adapt)


def decides_by_signals(settings: TrainSettings) -> bool:
    """Whether one of the job's policies needs signals."""
    return any(needs_signals(policy.kind) for policy in settings.adapt)


def wants_norms(settings: TrainSettings) -> bool:
    """Whether the job needs gradient norms."""
    asked = any(name in GRADIENT_MONITORS for name in settings.monitor)
    return asked or any(needs_norms(policy.kind) for policy in settings.adapt)
