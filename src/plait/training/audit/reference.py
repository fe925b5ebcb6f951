"""The model of an audit: as the job's factories make it, with nothing of the run's own."""

from __future__ import annotations

from plait.training.components import Components, with_fresh_model
from plait.training.run import Run

# Up to this step audits follow each other so closely that the model is kept.
_CLOSE_STEPS = 16


def take_reference(run: Run, step: int) -> Components:
    """Model, loss and optimizer made anew, or those of the audit before, to be given the state of now."""
    record = run.audits
    found = record.reference or with_fresh_model(run.parts, run.settings)
    record.reference = found if step < _CLOSE_STEPS else None
    return found
