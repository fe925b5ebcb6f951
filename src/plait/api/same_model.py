"""One model on all workers: refuses models that differ, and copies tensors of rank 0."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from plait.api.world import World
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.core.errors import InputError
from plait.data.call_model import fused_parts

Ranks = tuple[int, int]
# Tensors of one type, and their values in one.
Copies = list[tuple[list[Tensor], Tensor]]


def specs_of(module: nn.Module, apart: bool = False) -> dict[str, str]:
    """The dtype, shape and requires_grad of each parameter and buffer.

    With `apart`, what fused trials share has the shape that it has when each has its own, as it may soon.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fused = fused_parts(module) if apart else []
    trials = {number: [each.trials] for each in fused for number in each.shared_ids()}
    return {
        name: f"{t.dtype} {[*trials.get(id(t), ()), *t.shape]} {t.requires_grad}"
        for name, t in tensors.items()
    }


def refuse_difference(owner: str, first: Mapping[str, str], there: Mapping[str, str], ranks: Ranks) -> None:
    """Refuse models with unlike `specs_of` on two ranks."""
    if list(first.items()) == list(there.items()):
        return
    names = [name for name in {**first, **there} if first.get(name) != there.get(name)]
    what = "the order of its parameters differs"
    if names:
        kinds = [each.get(names[0], "not there") for each in (first, there)]
        what = f"{names[0]} is {kinds[0]} on rank {ranks[0]} and {kinds[1]} on rank {ranks[1]}"
    raise InputError(
        f"{owner}: the model differs between workers: {what} (dtype, shape, requires_grad); build the same "
        "model on all of them"
    )


def check_same_model(owner: str, module: nn.Module) -> None:
    """Refuse models that differ between workers; `owner` is the class that is given the model."""
    specs = specs_of(module)
    digests = all_gather_values(hashlib.sha256(json.dumps(specs).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, there = (broadcast_value(specs, source) for source in (0, rank))
    refuse_difference(owner, first, there, (0, rank))


def check_optimizer(owner: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of parameters that are not the model's, which workers would train apart."""
    known = {id(parameter) for parameter in module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise InputError(
                    f"{owner}: param_groups[{number}] of the optimizer has a parameter of shape "
                    f"{list(parameter.shape)} that is not one of the model's, so each worker would train it "
                    "alone; make the optimizer from model.parameters()"
                )


class TrainedParameters:
    """The parameters of `module` that require a gradient when `owner`, a class that trains it, is made.

    What is added, replaced, unfrozen or converted later would be trained by each worker alone.
    """

    def __init__(self, owner: str, module: nn.Module) -> None:
        self._owner, self._module = owner, module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError(f"{owner}: no parameter of the model requires a gradient")
        self._kinds = {id(p): (p.dtype, p.device) for p in self.parameters}
        # Parameters with hooks after their gradient was accumulated, and their versions at the last check.
        self._hooked: list[tuple[nn.Parameter, int]] = []

    def check(self) -> None:
        """Refuse a model that has other parameters now; quick enough for every step."""
        kinds, modules = self._kinds, [self._module]
        self._hooked.clear()
        while modules:
            module = modules.pop()
            for parameter in module._parameters.values():
                if parameter is None or not parameter.requires_grad:
                    continue
                if kinds.get(id(parameter)) != (parameter.dtype, parameter.device):
                    raise InputError(self._describe(parameter))
                if parameter._post_accumulate_grad_hooks:
                    self._hooked.append((parameter, parameter._version))
            modules += [each for each in module._modules.values() if each is not None]

    def check_hooks(self) -> None:
        """Refuse hooks that have updated parameters, or taken all gradients, in backward since `check`."""
        if not self._hooked:
            return
        updated = [parameter for parameter, version in self._hooked if parameter._version != version]
        if updated or all(parameter.grad is None for parameter in self.parameters):
            first = updated[0] if updated else self._hooked[0][0]
            name = next(name for name, each in self._module.named_parameters() if each is first)
            what = "changes it" if updated else "takes its gradient away"
            raise InputError(
                f"{self._owner}: a hook of {name} (register_post_accumulate_grad_hook) {what} during "
                "backward, before gradients are summed over the workers; call optimizer.step() after backward"
            )

    def _describe(self, parameter: nn.Parameter) -> str:
        name = next(name for name, each in self._module.named_parameters() if each is parameter)
        what = f"{name} was added, replaced or unfrozen"
        if id(parameter) in self._kinds:
            what = f"{name} was converted to {parameter.dtype} on {parameter.device}"
        return (
            f"{self._owner}: {what} after the {self._owner} was made, and would be trained by each worker "
            f"alone; change the model first, or make another {self._owner}"
        )


def share_model(owner: str, module: nn.Module, world: World) -> None:
    """Copy the model of rank 0 to all workers, who call it together; refuses models that differ."""
    check_same_model(owner, module)
    copy_of_first([*module.parameters(), *module.buffers()], world)
    draw_apart(module, world)


def draw_apart(module: nn.Module, world: World) -> None:
    """Have fused modules draw other numbers on each worker, though their seeds are equal."""
    for fused in fused_parts(module):
        fused.worker = world.rank


@torch.no_grad()
def copy_of_first(tensors: Iterable[Tensor], world: World) -> Copies:
    """Copy the tensors of rank 0 to all workers; returns what was sent.

    The values of a single tensor are its own memory, those of several are copies.
    """
    copies: Copies = []
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        flat = _flatten_dense_tensors(same)
        dist.broadcast(flat.view(torch.uint8), 0)  # backends lack some types
        if world.rank != 0:
            torch._foreach_copy_(same, _unflatten_dense_tensors(flat, same))
        copies.append((same, flat))
    return copies


def copies_of(tensors: Iterable[Tensor]) -> Copies:
    """Copies of the tensors, for `restore`."""
    return [([tensor], tensor.detach().clone().reshape(-1)) for tensor in tensors if tensor.numel()]


@torch.no_grad()
def restore(copies: Copies) -> None:
    """Give tensors the values that they had when they were copied."""
    for same, flat in copies:
        torch._foreach_copy_(same, _unflatten_dense_tensors(flat, same))
