"""The module of all trials, from the models of one each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.check import hyperparameters
from plait.fusion.copies import independent_copy
from plait.fusion.dispatch.install import recurrent_in, refresh_recurrent, slots_of, stack
from plait.fusion.trials.per_trial import PerTrial


def stacked(models: Sequence[nn.Module], shared: Collection[str]) -> nn.Module:
    """A copy of the first model with the stacked tensors of all models; those of `shared` are the first's."""
    tensors = [{slot.key: slot.tensor for slot in slots_of(model)} for model in models]
    memo: dict[int, Any] = {}
    for slot in slots_of(models[0], shared):
        tensor = slot.tensor
        if tensor is None or id(tensor) in memo:
            continue
        if slot.is_shared:
            memo[id(tensor)] = same_memory(tensor)
        else:
            every = stack([one[slot.key] for one in tensors])
            memo[id(tensor)] = every if slot.is_buffer else nn.Parameter(every, tensor.requires_grad)
    for part in models[0].modules():
        if isinstance(part, torch.jit.ScriptModule):
            memo.setdefault(id(part), _placeholder(part, memo))
    module = independent_copy(models[0], memo, hooks=False)
    for path, (*outer, name), values in hyperparameters(models):
        attributes = vars(module.get_submodule(path))
        holder = attributes[outer[0]] if outer else attributes
        holder[name] = PerTrial(values)
    refresh_recurrent(recurrent_in(module))
    return module


def same_memory(tensor: Tensor) -> Tensor:
    """Another tensor object for the same memory, so that moving one does not move the other.

    Parameters of other classes, such as those of quantized layers, are the objects themselves.
    """
    if type(tensor) is nn.Parameter:
        return nn.Parameter(tensor.detach(), False)
    return tensor.detach() if type(tensor) is Tensor else tensor


def _placeholder(part: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A module that holds the fused tensors of a scripted module, whose code takes only plain tensors."""
    made = nn.Module()
    for name, parameter in part.named_parameters(recurse=False):
        made.register_parameter(name, memo[id(parameter)])
    for name, buffer in part.named_buffers(recurse=False):
        made.register_buffer(name, memo[id(buffer)])
    for name, child in part.named_children():
        made.add_module(name, _placeholder(child, memo))
    return made
