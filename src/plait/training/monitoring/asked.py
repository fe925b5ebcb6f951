"""What a job asks to be measured."""

from __future__ import annotations

from plait.adapt.policies.registry import needs_norms
from plait.schema.settings import TrainSettings

GRADIENT_MONITORS = ("noise-scale", "variance")


def is_monitored(settings: TrainSettings) -> bool:
    """Whether the job asks for signals, itself or by its policies."""
    return bool(settings.monitor or settings.adapt)


def wants_norms(settings: TrainSettings) -> bool:
    """Whether gradient norms are among what it asks for."""
    asked = any(name in GRADIENT_MONITORS for name in settings.monitor)
    return asked or any(needs_norms(policy.kind) for policy in settings.adapt)
