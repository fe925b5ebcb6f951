"""The state of a model and of its optimizer, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.core.errors import CheckpointError
from plait.pipeline.cpu.linear import laid_out_as

Tensors = dict[str, Tensor]


def tensors_of(model: torch.nn.Module) -> Tensors:
    """The parameters and buffers of a model, each by its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def model_state(model: torch.nn.Module) -> Tensors:
    """The model's parameters and buffers by name; a tied one under each of its names."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Tensors:
    """The optimizer's state as `parameter name/key` -> tensor; numbers become scalars.

    Of parameters without a name there is none: an optimizer of a stage without parameters has a dummy.
    """
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value).detach()
        for parameter, values in optimizer.state.items()
        if parameter in names
        for key, value in values.items()
        if value is not None
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: Tensors
) -> None:
    """Put what `optimizer_state` returned back, each tensor where the optimizer keeps it."""
    whole = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
    whole["state"] = {}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        if name not in numbers:
            raise CheckpointError(f"the optimizer's state is of another model: it has {name!r}")
        number = numbers[name]
        whole["state"].setdefault(number, {})[key] = laid_out_as(parameters[number], value)
    optimizer.load_state_dict(whole)
