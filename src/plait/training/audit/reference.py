"""Model and optimizer of an audit: as the job's factories make them, with nothing of the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from plait.schema.settings import TrainSettings
from plait.training.audit.record import AuditRecord
from plait.training.components import Components
from plait.training.optimizers.build import build_optimizer
from plait.training.optimizers.lr_schedule import set_lr
from plait.training.setup.model import build_model
from plait.training.trial import Trial
from plait.verification.reference_optimizer import OptimizerTwin
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


def make_twin(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    base_lrs: Sequence[float],
    trial: Trial,
    step: int,
) -> OptimizerTwin:
    """The twin of an optimizer that takes the update of `step`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def make(twins: Sequence[Parameter]) -> torch.optim.Optimizer:
        named: dict[Tensor, str] = {twin: names.get(p, "") for p, twin in zip(parameters, twins)}
        return build_optimizer(trial.settings.optimizer, twins, named, plain=True)

    return OptimizerTwin(optimizer, names, make, lambda twin: set_lr(twin, base_lrs, trial.lr_factor(step)))


def unscale_and_clip(parameters: Sequence[Parameter], scale: float, clip_norm: float | None) -> None:
    """Take the loss scale out of gradients and clip them, as a run does before an update."""
    for parameter in parameters if scale != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
