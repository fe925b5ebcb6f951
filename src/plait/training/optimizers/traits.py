"""Traits of a job's optimizer that matter for training on several workers."""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn import Parameter

from plait.core.errors import JobError
from plait.pipeline.verify import optimizer_traits
from plait.pipeline.verify.optimizer_traits import Traits
from plait.schema.settings import OptimizerSettings
from plait.training.optimizers.build import build_optimizer


def traits_of(settings: OptimizerSettings, named: Mapping[str, Parameter]) -> Traits:
    """The traits of the job's optimizer, tried out on copies of some of the parameters `named`."""
    return optimizer_traits.find_traits(
        lambda parameters, names: build_optimizer(settings, parameters, names), named
    )


def check_summed(settings: OptimizerSettings, named: Mapping[str, Parameter]) -> None:
    """Refuse an optimizer whose `zero_grad` leaves gradients, where those of several workers are summed."""
    if why := optimizer_traits.objection_where_summed(settings.kind, traits_of(settings, named)):
        raise JobError(f"optimizer.kind: {why}")
