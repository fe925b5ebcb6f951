"""Between a fused optimizer and torch's own, one a trial: trials come and leave with their states."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.optim.groups import torch_names
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.fusion.optim.updates import KINDS, kind_of


def split_optimizer(optimizer: FusedOptimizer, modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Torch's own optimizers with the trials' states, over the modules that `fused.split()` returned."""
    return [lone_optimizer(optimizer, module, number) for number, module in enumerate(modules)]


def lone_optimizer(fused: FusedOptimizer, module: nn.Module, number: int) -> torch.optim.Optimizer:
    """Torch's own optimizer with one trial's state, over the module that `fused.trial(number)` returned."""
    parameters = _by_fused(fused.fused, module)
    make: Any = fused.kind.torch_class
    groups = [
        {
            **{name: _of_trial(group[name], number) for name in torch_names(fused.kind)},
            **group.switches,
            "params": [parameters[parameter] for parameter in group["params"]],
        }
        for group in fused.groups
    ]
    lone: torch.optim.Optimizer = make(groups)
    for group in fused.groups:
        for parameter in group["params"]:
            clock = group.counts(parameter)
            steps = (clock.steps if fused.kind.counts_steps else clock.pushes)[number].item()
            if steps == 0:
                continue
            state = fused.state[parameter]
            own: dict[str, Any] = {name: tensor[number].detach().clone() for name, tensor in state.items()}
            if fused.kind.counts_steps:
                own["step"] = torch.tensor(steps, dtype=torch.float32)
                if group.numbers.get("momentum", [1.0] * (number + 1))[number] == 0.0:
                    own.pop("momentum_buffer", None)
            lone.state[parameters[parameter]] = own
    return lone


def _of_trial(value: Any, number: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_of_trial(one, number) for one in value)
    return value.of(number) if hasattr(value, "of") else value


def _by_fused(fused: FusedModule, module: nn.Module) -> dict[Tensor, nn.Parameter]:
    """By each fused parameter the one of the same name in a trial's own module."""
    own = dict(module.named_parameters())
    return {parameter: own[name] for name, parameter in fused.module.named_parameters()}


def fuse_optimizers(
    fused: FusedModule,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module] | None = None,
    **options: Any,
) -> FusedOptimizer:
    """The states of lone optimizers, at whatever ages, as one optimizer of the fused module.

    Groups of parameters stay groups. `models` are those that were fused, over whose parameters the optimizers
    are; without them a parameter is known by its values.
    """
    kinds = {kind_of(optimizer) for optimizer in optimizers}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or len({len(optimizer.param_groups) for optimizer in optimizers}) > 1:
        raise FusionError(
            f"fuse_optimizers: found {sorted({type(o).__name__ for o in optimizers})} with "
            f"{[len(o.param_groups) for o in optimizers]} groups of parameters, expected one kind of "
            f"{sorted(KINDS)} with as many groups each"
        )
    every = [group for optimizer in optimizers for group in optimizer.param_groups]
    if kind == "adam" and _common_switch("decoupled_weight_decay", every):
        kind = "adamw"
    given = [None] * len(optimizers) if models is None else models
    places = [_places(fused, o, number, model) for number, (o, model) in enumerate(zip(optimizers, given))]
    groups = [
        _fused_group(fused, kind, [optimizer.param_groups[place] for optimizer in optimizers], names)
        for place, names in enumerate(_common_places(places))
    ]
    made = FusedOptimizer(fused, kind, params=groups, **options)
    for number, (optimizer, own) in enumerate(zip(optimizers, places)):
        _load_states(made, optimizer, number, own)
    return made


def _fused_group(
    fused: FusedModule, kind: str, groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """A group of fused parameters, by name, with the numbers that the trials' groups have."""
    parameters = dict(fused.module.named_parameters())
    numbers: dict[str, Any] = {name: [group[name] for group in groups] for name in torch_names(KINDS[kind])}
    switches = {name: _common_switch(name, groups) for name in KINDS[kind].common}
    return {**numbers, **switches, "params": [parameters[name] for name in names]}


def _common_switch(name: str, groups: Sequence[Mapping[str, Any]]) -> bool:
    """A switch that all trials must have alike, since one formula computes them all."""
    found = [bool(group.get(name, False)) for group in groups]
    if len(set(found)) > 1:
        raise FusionError(
            f"fuse_optimizers: found {name} = {found}, expected one value for all trials; fuse those with "
            f"equal ones together"
        )
    return found[0]


def _common_places(places: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The names of the parameters in each group, which must be the same for all trials."""
    for number, own in enumerate(places):
        for group, (names, first) in enumerate(zip(own, places[0])):
            if set(names) != set(first):
                odd = sorted(set(names) ^ set(first))[0]
                raise FusionError(
                    f"fuse_optimizers: {odd!r} is in group {group} of the optimizer of one of the trials 0 "
                    f"and {number}, and not of the other; expected the same groups in all trials"
                )
    return [list(names) for names in places[0]]


@torch.no_grad()
def load_trial(
    fused: FusedOptimizer, optimizer: torch.optim.Optimizer, number: int, model: nn.Module | None = None
) -> None:
    """Give one trial the hyperparameters and the state of a lone optimizer, over `model`'s parameters.

    Without a model its parameters are known by their values.
    """
    places = _places(fused.fused, optimizer, number, model)
    names = {parameter: name for name, parameter in fused.fused.module.named_parameters()}
    expected = [[names[parameter] for parameter in group["params"]] for group in fused.groups]
    if [set(own) for own in places] != [set(own) for own in expected]:
        raise FusionError(
            f"fuse_optimizers: trial {number}'s optimizer has {[len(own) for own in places]} parameters in "
            f"its groups, expected those of the array: {[len(own) for own in expected]}"
        )
    for group, lone in zip(fused.groups, optimizer.param_groups):
        group.set_trial(number, {name: lone[name] for name in torch_names(fused.kind)})
    _load_states(fused, optimizer, number, places)


@torch.no_grad()
def _load_states(
    fused: FusedOptimizer, optimizer: torch.optim.Optimizer, number: int, places: Sequence[Sequence[str]]
) -> None:
    # After the hyperparameters are the trial's: some of them say what a state begins with.
    fused.forget_trial(number)
    if not optimizer.state:
        return
    parameters = dict(fused.fused.module.named_parameters())
    for group, lone, names in zip(fused.groups, optimizer.param_groups, places):
        rows = {id(clock): (clock.steps.tolist(), clock.pushes.tolist()) for clock in group.clocks}
        counts = {p: copy.deepcopy(rows[id(group.counts(p))]) for p in group["params"]}
        for parameter, name in zip(lone["params"], names):
            own, stacked = optimizer.state.get(parameter, {}), parameters[name]
            if not own:
                continue
            for key, tensor in fused.state_of(group, stacked).items():
                if own.get(key) is not None:
                    tensor[number] = own[key]
            pushed = float(own.get("momentum_buffer") is not None)
            steps, pushes = counts[stacked]
            steps[number], pushes[number] = float(own.get("step", pushed)), pushed
        group.set_counts(counts)


def _places(
    fused: FusedModule, optimizer: torch.optim.Optimizer, number: int, model: nn.Module | None
) -> list[list[str]]:
    """The names of the parameters in each group of a lone optimizer."""
    if model is not None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    free = {name: parameter[number].detach() for name, parameter in fused.module.named_parameters()}
    # Those that a plain optimizer over all parameters, or over the trained ones, would have in these places.
    usual = list(free)
    trained = [name for name, parameter in fused.module.named_parameters() if parameter.requires_grad]
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    usual = trained if count == len(trained) else usual
    found: list[list[str]] = []
    position = 0
    for group in optimizer.param_groups:
        found.append([])
        for parameter in group["params"]:
            likely = usual[position] if position < len(usual) else ""
            order = sorted(free, key=lambda name: name != likely)
            same = [name for name in order if _is_same(free[name], parameter)]
            if not same:
                raise FusionError(
                    f"fuse_optimizers: parameter {position} of trial {number}'s optimizer, of shape "
                    f"{tuple(parameter.shape)}, has the values of none of the fused trial's; expected the "
                    f"optimizer of the very model that was fused, as it was then"
                )
            found[-1].append(same[0])
            del free[same[0]]
            position += 1
    _refuse_ambiguous(fused, found, number)
    return found


def _refuse_ambiguous(fused: FusedModule, places: Sequence[Sequence[str]], number: int) -> None:
    """Refuse equal parameters in unlike groups: their values do not say which is in which."""
    parameters = dict(fused.module.named_parameters())
    for group, names in enumerate(places):
        for other in places[group + 1 :]:
            for one in names:
                for two in other:
                    if _is_same(parameters[one][number], parameters[two][number]):
                        raise FusionError(
                            f"fuse_optimizers: {one!r} and {two!r} are equal and in two groups of trial "
                            f"{number}'s optimizer; say which is which: fuse_optimizers(..., models=models)"
                        )


def _is_same(own: Tensor, other: Tensor) -> bool:
    return own.shape == other.shape and bool(((own == other.to(own)) | own.isnan()).all())
