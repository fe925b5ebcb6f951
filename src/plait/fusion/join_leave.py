"""Changes of the trials in an array: trials leave, join or are replaced, without affecting the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.core.names import did_you_mean
from plait.fusion.check import check_structure, different_attributes, tensor_attributes
from plait.fusion.copies import gradient_hooks, held_values
from plait.fusion.dispatch.install import slots_of
from plait.fusion.dispatch.per_trial import PerTrial, float_holders, one_each
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.fusion.optim.whole_schedulers import begin_from
from plait.fusion.sharing import equal_values, is_same_view
from plait.fusion.trials.partial_gradients import select_gradient
from plait.workloads.adapters.forms import is_adapted

log = logging.getLogger(__name__)


def keep_trials(
    fused: FusedModule,
    optimizer: FusedOptimizer,
    numbers: Sequence[int],
    seeds: Sequence[int] | None = None,
) -> None:
    """Keep the trials `numbers`, in this order; the others leave the array.

    A number that occurs twice makes a copy, as in population-based training: weights, buffers, optimizer
    state and hyperparameters. `seeds` gives the trials new random streams.
    """
    _check_whole(fused, optimizer)
    wrong = [number for number in numbers if not 0 <= number < fused.trials]
    if wrong or not numbers:
        raise FusionError(
            f"keep_trials: found {list(numbers)}, expected one or more of the trials 0 to {fused.trials - 1}"
        )
    index = torch.tensor(list(numbers), device=fused.seeds.device)
    frozen = [position for position, number in enumerate(numbers) if number in fused.frozen]
    _select(fused, index)
    optimizer.select(index)
    if seeds is not None:
        fused.seeds.copy_(torch.tensor(list(seeds)))
    fused.freeze(frozen)
    fused.begin_step()


def add_trials(
    fused: FusedModule,
    optimizer: FusedOptimizer,
    models: Sequence[nn.Module],
    seeds: Sequence[int],
    hyperparameters: Mapping[str, Sequence[float]] | None = None,
    steps: Sequence[int] | None = None,
) -> None:
    """Add new models as the last trials, each with a fresh optimizer state.

    `hyperparameters` are keyed by torch's names; those not given are copied from trial 0.
    """
    before = fused.trials
    keep_trials(fused, optimizer, [*range(before), *[0] * len(models)])
    for offset, model in enumerate(models):
        trial_hyperparameters = {name: values[offset] for name, values in (hyperparameters or {}).items()}
        limit = None if steps is None else steps[offset]
        replace_trial(fused, optimizer, before + offset, model, seeds[offset], trial_hyperparameters, limit)


@torch.no_grad()
def replace_trial(
    fused: FusedModule,
    optimizer: FusedOptimizer,
    number: int,
    model: nn.Module,
    seed: int,
    hyperparameters: Mapping[str, float] | None = None,
    steps: int | None = None,
) -> None:
    """Replace trial `number` by a new model, in the same memory.

    `steps` is the number of steps of the new trial, if the optimizer limits them.
    """
    _check_whole(fused, optimizer)
    given, model = model, fused.forms.fitted(model, fused.module)
    fused.forms.replace(number, given, fused.module, fused.trials)
    optimizer.check_ranks()
    _let_differ(fused, number, model)
    _write_model(fused, number, model)
    if fused.plain_models:
        fused.plain_models[number] = model
    for name, modules in fused.per_trial_modules.items():
        modules.replace(number, fused.copy_of(model, name))
    fused.seeds[number], fused.ages[number] = seed, 0
    changed = {**(hyperparameters or {})}
    if "clip_norm" in changed:
        _set_clip(optimizer, number, changed.pop("clip_norm"))
    names = optimizer.kind.torch_names()
    unknown = next((name for name in changed if name not in names), None)
    if unknown is not None:
        hint = did_you_mean(unknown, [*names, "clip_norm"])
        raise FusionError(f"replace_trial: the optimizer has no hyperparameter {unknown!r}{hint}")
    for group in optimizer.groups:
        group.set_trial(number, changed)
    if "lr" in changed:
        begin_from(optimizer, number, changed["lr"])
    # After the hyperparameters are set, as the initial state depends on some of them.
    optimizer.forget_trial(number)
    if steps is not None and optimizer.limits is not None:
        optimizer.limits[number] = steps
    fused.freeze([other for other in fused.frozen if other != number])
    fused.begin_step()
    optimizer.notice_finished()


def _check_whole(fused: FusedModule, optimizer: FusedOptimizer) -> None:
    """Raise FusionError if the optimizer also has parameters of a module whose trials would stay."""
    known = {id(parameter) for parameter in fused.module.parameters()}
    if optimizer.fused is not fused or not all(id(p) in known for g in optimizer.groups for p in g["params"]):
        raise FusionError(
            "trials join and leave together with their optimizer: found one with other parameters than those "
            "of this fused module; give each fused module an optimizer"
        )


def check_joining(fused: FusedModule, models: Sequence[nn.Module]) -> None:
    """Raise FusionError for models that cannot join the fused ones in their current state."""
    if models:
        fitted = (fused.forms.fitted(model, fused.module) for model in models)
        check_structure([fused.array_trial(0), *fitted])


def _let_differ(fused: FusedModule, number: int, model: nn.Module) -> None:
    """Unfuse submodules whose Python state, such as a counter, differs from that of the new model."""
    before = fused.array_trial(number)
    check_structure([before, model])
    for path, name in different_attributes(before, model):
        fused.unfuse(path, f"its attribute {name} changes as it trains")


def _set_clip(optimizer: FusedOptimizer, number: int, limit: float | None) -> None:
    """Set the gradient norm limit of one trial; None is no limit."""
    if optimizer.clip_norm is None:
        if limit is None:
            return
        optimizer.clip_norm = torch.full_like(optimizer.steps, float("inf"), dtype=torch.float64)
    optimizer.clip_norm[number] = float("inf") if limit is None else limit


def _write_model(fused: FusedModule, number: int, model: nn.Module) -> None:
    for hooks, parameter in zip(fused.gradient_hooks, model.parameters()):
        hooks[number] = gradient_hooks(parameter)
    _unshare_other(fused, model)
    shared = fused.shared_ids()
    tensors = [*model.parameters(), *model.buffers()]
    stacked = [*fused.module.parameters(), *fused.module.buffers()]
    for target, source in zip(stacked, tensors):
        if id(target) not in shared:
            target.data[number].copy_(source.detach())
            if target.grad is not None:
                target.grad[number] = 0.0
    parts = dict(model.named_modules())
    for path, name, (before, after) in tensor_attributes([fused.array_trial(number), model]):
        part = fused.module.get_submodule(path)
        if not isinstance(part.__dict__[name], TrialTensor):
            part.__dict__[name] = fused.of_trials(before)
        part.__dict__[name].stacked[number].copy_(after.detach())
    for path, part in fused.module.named_modules():
        for holder, key, floats in float_holders(vars(part), vars(parts[path])):
            if key in floats:
                values = one_each(key, holder[key], fused.trials)
                values[number] = float(floats[key])
                holder[key] = PerTrial(values) if len(set(values)) > 1 else values[0]


def _unshare_other(fused: FusedModule, model: nn.Module) -> None:
    """Give each trial its own of the shared tensors that `model` has other values of."""
    tensors = {slot.key: slot.tensor for slot in slots_of(model)}
    for name, tensor in list(fused.shared.items()):
        other = tensors[name]
        if name not in fused.shared or is_same_view(tensor, other):
            continue
        if other.requires_grad or not equal_values(tensor, other.to(tensor)):
            # Of adapters, all is frozen but what they add: then this is an adapter of another base.
            level = logging.INFO if other.requires_grad or not is_adapted(model) else logging.WARNING
            log.log(level, "%s differs in a trial that joins: each trial has its own from now on", name)
            fused.unshare(name)
            fused.unlike_base = [*fused.unlike_base, name]


def _select(fused: FusedModule, index: Tensor) -> None:
    """Select trials in all that has one value for each; parameters stay the same objects."""
    shared, numbers = fused.shared_ids(), index.tolist()
    for parameter in fused.module.parameters():
        if id(parameter) not in shared:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data[index]
            select_gradient(parameter, gradient, numbers)
    # A buffer with several names stays one tensor.
    changed: dict[int, tuple[Tensor, Tensor]] = {}
    for part in fused.module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in shared:
                part._buffers[name] = changed.setdefault(id(buffer), (buffer, buffer[index]))[1]
    for value in held_values(fused.module):
        if isinstance(value, TrialTensor):
            # Detached, as its autograd history refers to parameters with the old number of trials.
            value._stacked = value.stacked.detach()[index]
    for part in fused.module.modules():
        for holder, key, _ in float_holders(vars(part)):
            if isinstance(holder[key], PerTrial):
                holder[key] = PerTrial([holder[key].of(number) for number in numbers])
    lists: list[list[Any]] = [fused.plain_models, fused.forms.own, *fused.gradient_hooks]
    for values in filter(None, lists):
        values[:] = [values[number] for number in numbers]
    fused.seeds, fused.ages = fused.seeds[index], fused.ages[index]
    fused.set_count(len(numbers))
    for modules in fused.per_trial_modules.values():
        modules.reorder(numbers)
