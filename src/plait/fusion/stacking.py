"""The module of all trials, from the models of one each, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.check import hyperparameters
from plait.fusion.copies import held_values, independent_copy
from plait.fusion.dispatch.install import recurrent_in, refresh_recurrent, slots_of, stack
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.tensor import OF_TRIAL
from plait.fusion.forward_patches import REPLACED, Patch
from plait.fusion.trials.unfused import PerTrialModules


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


def unstacked(
    module: nn.Module, number: int, shared: Iterable[Tensor], unfused: Iterable[PerTrialModules]
) -> nn.Module:
    """The model of one trial; shared parameters are in the memory of `module`, the rest is copied."""
    # A buffer is copied, as the trial may write to it.
    memo: dict[Any, Any] = {
        id(t): same_memory(t) if isinstance(t, nn.Parameter) else t.clone() for t in shared
    }
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in memo:
            value = tensor.detach()[number].clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    # Tensors that a forward stored in an attribute, such as attention weights, have the trials axis too.
    memo[OF_TRIAL] = number
    memo |= {id(value): value.of(number) for value in held_values(module) if isinstance(value, PerTrial)}
    for modules in unfused:
        memo[id(modules.part)] = modules.copy_of(number, memo)
    made = independent_copy(module, memo, hooks=False)
    for part in made.modules():
        for name in REPLACED:
            if isinstance(vars(part).get(name), Patch):
                delattr(part, name)
    refresh_recurrent(recurrent_in(made))
    return made


def is_within(name: str, others: Iterable[str]) -> bool:
    """Whether a module is one of others, or inside of one; "" is the whole model."""
    return any(name == other or name.startswith(f"{other}.") or not other for other in others)


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
