"""The model of an audit: as the job's factories make it, with nothing of the run's own."""

from __future__ import annotations

from plait.schema.settings import TrainSettings
from plait.training.audit.record import AuditRecord
from plait.training.components import Components, build_model
from plait.verification.replay import PlainModel
from plait.workloads.losses import build_loss

# Up to this step audits follow each other so closely that the model is kept.
_CLOSE_STEPS = 16


def take_reference(
    record: AuditRecord, components: Components, settings: TrainSettings, step: int
) -> PlainModel:
    """A newly built model and loss, or those of the last audit; the caller loads the present state."""
    reference = record.reference
    if reference is None:
        model = build_model(settings.model, settings.seed).to(components.device, components.dtype)
        reference = PlainModel(model, build_loss(settings.loss, settings.loss_args), components.autocast)
    record.reference = reference if step < _CLOSE_STEPS else None
    return reference
