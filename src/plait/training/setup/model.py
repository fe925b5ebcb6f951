"""The model that the settings of a run name, with its adapter, in training mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parameter import is_lazy

from plait.core.codec import encode
from plait.core.errors import JobError
from plait.core.names import check_arguments, resolve
from plait.data.seeding import seed_factory
from plait.schema.settings import ModelSettings, TrainSettings
from plait.training.fused.shared_bases import base_of, leaves_base, take_trained
from plait.training.setup.precision import dtype_of
from plait.workloads.adapters.lora import add_lora, check_lora
from plait.workloads.from_transformers import factory_of

_IN_EVALUATION_MODE = (
    "model: {} returned a model in evaluation mode, as from_pretrained does; all of it is put into training "
    "mode (call train() in the factory, and then eval() of the parts that are to stay in evaluation mode)"
)


def find_model(settings: ModelSettings) -> Callable[..., torch.nn.Module]:
    if settings.adapter is not None:
        check_lora(settings.adapter)
    factory: Callable[..., torch.nn.Module] | None = factory_of(settings.factory)
    if factory is None:
        factory = resolve(settings.factory, "model", JobError)
    if isinstance(factory, torch.nn.Module):
        name = settings.factory.rpartition(":")[2]
        raise JobError(
            f"model: {settings.factory} is a {type(factory).__name__} that is made already, expected a "
            f"function or class that makes it: each worker, and each trial, has its own; write def make(): "
            f"return ... and name that instead of {name}"
        )
    if not callable(factory):
        raise JobError(
            f"model: {settings.factory} is {factory!r}, expected a function or class that makes a model"
        )
    check_arguments(factory, settings.args, "model_args", JobError)
    return factory


def build_model(settings: ModelSettings, seed: int) -> torch.nn.Module:
    """The model in training mode, with initial weights that depend only on `seed`."""
    # Modules may draw while they are imported, too.
    seed_factory(seed)
    model = _trained(_made(find_model(settings), settings, seed))
    return model if settings.adapter is None else add_lora(model, settings.adapter, settings.lora_array)


def _made(factory: Callable[..., torch.nn.Module], settings: ModelSettings, seed: int) -> torch.nn.Module:
    """The model without its adapter, in the mode that the factory returned it in."""
    seed_factory(seed)
    model = factory(**settings.args)
    if not isinstance(model, torch.nn.Module):
        raise JobError(
            f"model: {settings.factory} returned {type(model).__name__}, expected a torch.nn.Module"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise JobError(
                f"model: {settings.factory} has a parameter without a size yet, {name} (LazyLinear and its "
                f"like); give the sizes, or run the model once on a sample in the factory"
            )
    return model


def build_placed_model(
    factory: Callable[..., torch.nn.Module], settings: TrainSettings, device: torch.device
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """The model in training mode on `device`, and warnings."""
    model, dtype, warned = settings.model, dtype_of(settings), []

    def make() -> torch.nn.Module:
        made = _made(factory, model, settings.seed)
        if not made.training:
            warned.append(_IN_EVALUATION_MODE.format(model.factory))
        return _trained(made)

    if model.adapter is None:
        return make().to(device, dtype), tuple(warned)
    # A pipeline's layers change hands between workers.
    if settings.in_stages or not leaves_base(model.adapter):
        base = make()
    else:
        seed_factory(settings.seed)
        key = model.factory, encode(model.args), device, dtype
        base = base_of(key, settings.seed, lambda: make().to(device, dtype))
    made = add_lora(base, model.adapter, model.lora_array).to(device, dtype)
    take_trained(made)
    return made, tuple(warned)


def _trained(model: torch.nn.Module) -> torch.nn.Module:
    """All of a model that is not in training mode in it; else parts of it may be in evaluation mode."""
    return model if model.training else model.train()
