"""Conversion between a fused optimizer and one torch optimizer per trial, with their states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.fusion.optim.optimizer_kinds import KINDS, kind_of
from plait.fusion.optim.param_groups import as_switch
from plait.sync.weight_ema import EMA, decay_of, evaluates_ema


def split_optimizer(optimizer: FusedOptimizer, modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """One torch optimizer per trial, with its state, for the modules that `fused.split()` returned."""
    return [trial_optimizer(optimizer, module, number) for number, module in enumerate(modules)]


def trial_optimizer(fused: FusedOptimizer, module: nn.Module, number: int) -> torch.optim.Optimizer:
    """A torch optimizer with one trial's state, for the module that `fused.trial(number)` returned."""
    named = dict(module.named_parameters())
    parameters = {
        parameter: named[own]
        for name, parameter in fused.fused.module.named_parameters()
        if (own := fused.fused.forms.own_name(number, name)) is not None
    }
    make: Any = fused.kind.torch_class
    groups = [
        {
            **{name: group.of_trial(name, number) for name in fused.kind.torch_names()},
            **group.switches,
            "params": [parameters[parameter] for parameter in group["params"] if parameter in parameters],
        }
        for group in fused.groups
    ]
    single: torch.optim.Optimizer = make(groups)
    for group in fused.groups:
        for parameter in filter(parameters.__contains__, group["params"]):
            clock, single_parameter = group.counts(parameter), parameters[parameter]
            steps = (clock.steps if fused.kind.counts_steps else clock.pushes)[number].item()
            # An adapter may have a smaller rank than its array.
            part = _within(single_parameter)
            trial_state: dict[str, Any] = {
                name: tensor[number][part].detach().clone() for name, tensor in fused.state[parameter].items()
            }
            if steps == 0:
                # SGD without momentum counts no steps.
                trial_state = {EMA: trial_state[EMA]} if EMA in trial_state and clock.steps[number] else {}
            elif fused.kind.has_step:
                trial_state["step"] = torch.tensor(steps, dtype=torch.float32)
                if not group.numbers.get("momentum", [1.0] * (number + 1))[number]:
                    trial_state.pop("momentum_buffer", None)
                if "momentum_decay" in fused.kind.hyperparameters:
                    trial_state["mu_product"] = clock.mu_product[number].cpu().clone()
            if trial_state:
                single.state[single_parameter] = trial_state
    return single


def _within(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(size) for size in tensor.shape)


def fuse_optimizers(
    fused: FusedModule,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module] | None = None,
    **options: Any,
) -> FusedOptimizer:
    """One optimizer of the fused module with the states of the trials' optimizers, after any number of steps.

    Parameter groups are kept. `models` are the fused models, whose parameters the optimizers hold; without
    them a parameter is identified by its values.
    """
    kinds = {kind_of(optimizer) for optimizer in optimizers}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or len({len(optimizer.param_groups) for optimizer in optimizers}) > 1:
        raise FusionError(
            f"fuse_optimizers: found {sorted({_class_name(o) for o in optimizers})} with "
            f"{[len(o.param_groups) for o in optimizers]} groups of parameters, expected one type of "
            f"{sorted(KINDS)} with equal numbers of groups"
        )
    every = [group for optimizer in optimizers for group in optimizer.param_groups]
    if kind == "adam" and _common_switch("decoupled_weight_decay", every):
        kind = "adamw"
    given = [None] * len(optimizers) if models is None else models
    names_by_group = [
        _names_by_group(fused, o, number, model) for number, (o, model) in enumerate(zip(optimizers, given))
    ]
    groups = [
        _fused_group(fused, kind, [optimizer.param_groups[index] for optimizer in optimizers], names)
        for index, names in enumerate(_common_names(fused, names_by_group))
    ]
    decays = [decay_of(optimizer) for optimizer in optimizers]
    if None not in decays:
        options = {"ema": decays, **options}
    made = FusedOptimizer(fused, kind, params=groups, **options)
    made.evaluates_ema = all(map(evaluates_ema, optimizers))
    for number, (optimizer, names_of) in enumerate(zip(optimizers, names_by_group)):
        _load_states(made, optimizer, number, names_of)
    return made


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    """With its package where that is not torch's, as Adafactor has several."""
    package = type(optimizer).__module__.partition(".")[0]
    return type(optimizer).__name__ if package == "torch" else f"{package}'s {type(optimizer).__name__}"


def _fused_group(
    fused: FusedModule, kind: str, groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """A group of fused parameters, by name, with the hyperparameters of the trials' groups."""
    parameters = dict(fused.module.named_parameters())
    numbers: dict[str, Any] = {name: [group[name] for group in groups] for name in KINDS[kind].torch_names()}
    switches = {name: _common_switch(name, groups, start) for name, start in KINDS[kind].common.items()}
    return {**numbers, **switches, "params": [parameters[name] for name in names]}


def _common_switch(name: str, groups: Sequence[Mapping[str, Any]], default: Any = False) -> Any:
    """An option that must be equal in all trials since one formula computes them all."""
    values = [as_switch(default, group.get(name, default)) for group in groups]
    if len(set(values)) > 1:
        raise FusionError(
            f"fuse_optimizers: found {name} = {values}, expected one value for all trials; fuse trials with "
            f"equal values"
        )
    return values[0]


def _common_names(fused: FusedModule, names_by_group: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The parameter names in each group, which must be the same for all trials that have the parameter."""
    union = [list(dict.fromkeys(itertools.chain(*every))) for every in zip(*names_by_group)]
    for number, names_of in enumerate(names_by_group):
        for group, (names, every) in enumerate(zip(names_of, union)):
            expected = {name for name in every if fused.forms.own_name(number, name) is not None}
            if set(names) != expected:
                odd = sorted(set(names) ^ expected)[0]
                raise FusionError(
                    f"fuse_optimizers: {odd!r} is in group {group} of the optimizer of some trials, and not "
                    f"of trial {number}; expected the same groups in all trials"
                )
    return union


@torch.no_grad()
def load_trial(
    fused: FusedOptimizer, optimizer: torch.optim.Optimizer, number: int, model: nn.Module | None = None
) -> None:
    """Load the hyperparameters and state of a torch optimizer over `model`'s parameters into one trial.

    Without a model its parameters are identified by their values.
    """
    names_by_group = _names_by_group(fused.fused, optimizer, number, model)
    names = {parameter: name for name, parameter in fused.fused.module.named_parameters()}
    expected = [[names[parameter] for parameter in group["params"]] for group in fused.groups]
    own = [
        {name for name in group if fused.fused.forms.own_name(number, name) is not None} for group in expected
    ]
    if [set(group) for group in names_by_group] != own:
        raise FusionError(
            f"fuse_optimizers: trial {number}'s optimizer has {[len(group) for group in names_by_group]} "
            f"parameters in its groups, expected those of the array: {[len(group) for group in expected]}"
        )
    if fused.ema is not None and (decay := decay_of(optimizer)) is not None:
        fused.ema[number] = decay
    for group, single in zip(fused.groups, optimizer.param_groups):
        group.set_trial(number, {name: single[name] for name in fused.kind.torch_names()})
    _load_states(fused, optimizer, number, names_by_group)


@torch.no_grad()
def _load_states(
    fused: FusedOptimizer,
    optimizer: torch.optim.Optimizer,
    number: int,
    names_by_group: Sequence[Sequence[str]],
) -> None:
    # After the hyperparameters are set, as the initial state depends on some of them.
    fused.forget_trial(number)
    if not optimizer.state:
        return
    parameters = dict(fused.fused.module.named_parameters())
    for group, single, names in zip(fused.groups, optimizer.param_groups, names_by_group):
        rows = {id(clock): [row.tolist() for row in clock.rows] for clock in group.clocks}
        counts = {p: copy.deepcopy(rows[id(group.counts(p))]) for p in group["params"]}
        for parameter, name in zip(single["params"], names):
            trial_state, stacked = optimizer.state.get(parameter, {}), parameters[name]
            if not trial_state:
                continue
            for key, tensor in fused.state_of(group, stacked).items():
                if trial_state.get(key) is not None:
                    tensor[number][_within(trial_state[key])] = trial_state[key]
            steps, pushes, products = counts[stacked]
            steps[number] = float(trial_state.get("step", 1.0))
            pushes[number] = float(trial_state.get("momentum_buffer") is not None)
            products[number] = float(trial_state.get("mu_product", 1.0))
        group.set_counts(counts)


def _names_by_group(
    fused: FusedModule, optimizer: torch.optim.Optimizer, number: int, model: nn.Module | None
) -> list[list[str]]:
    """The parameter names in each group of a torch optimizer."""
    if model is not None:
        of_array = {fused.forms.own_name(number, name): name for name, _ in fused.module.named_parameters()}
        names = {parameter: of_array.get(name, name) for name, parameter in model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    shared = fused.shared_ids()
    values = {
        name: parameter.detach() if id(parameter) in shared else parameter[number].detach()
        for name, parameter in fused.module.named_parameters()
    }
    # The usual order: an optimizer over all parameters, or over the trained ones.
    trained = [name for name, parameter in fused.module.named_parameters() if parameter.requires_grad]
    given = [(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
    usual = trained if len(given) == len(trained) else list(values)
    free = dict(values)
    names_by_group: list[list[str]] = [[] for _ in optimizer.param_groups]
    for position, (index, parameter) in enumerate(given):
        order = sorted(free, key=lambda name: name not in usual[position : position + 1])
        same = next((name for name in order if _is_same(free[name], parameter)), None)
        if same is None:
            raise FusionError(
                f"fuse_optimizers: parameter {position} of trial {number}'s optimizer, of shape "
                f"{tuple(parameter.shape)}, does not equal any parameter of the fused trial; expected "
                f"the optimizer of the model that was fused, with the same values"
            )
        names_by_group[index].append(same)
        del free[same]
    # Values do not identify equal parameters in different groups.
    for first, second in itertools.combinations(names_by_group, 2):
        for one, other in itertools.product(first, second):
            if _is_same(values[one], values[other]):
                raise FusionError(
                    f"fuse_optimizers: {one!r} and {other!r} are equal and in two groups of trial "
                    f"{number}'s optimizer; tell them apart with fuse_optimizers(..., models=models)"
                )
    return names_by_group


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other.to(one)) | one.isnan()).all())
