"""What the planner refuses."""

from __future__ import annotations

from plait.core.errors import InputError


class PlanError(InputError):
    """No plan can be made of what was given; the message says what would have to change."""
