"""The model of an audit: as the job's factories make it, with nothing of the run's own."""

from __future__ import annotations

from plait.training.components import build_model
from plait.training.run import Run
from plait.verification.replay import FreshModel
from plait.workloads.losses import build_loss

# Up to this step audits follow each other so closely that the model is kept.
_CLOSE_STEPS = 16


def take_reference(run: Run, step: int) -> FreshModel:
    """Model and loss made anew, or those of the audit before, to be given the state of now."""
    record, parts, settings = run.audits, run.parts, run.settings
    found = record.reference
    if found is None:
        model = build_model(settings.model, settings.seed).to(parts.device, parts.dtype)
        found = FreshModel(model, build_loss(settings.loss, settings.loss_args), parts.autocast)
    record.reference = found if step < _CLOSE_STEPS else None
    return found
