"""Optimizers of a fused module: each trial with its own hyperparameters, steps and gradient clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.core.names import did_you_mean
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.updates import KINDS, Kind, kind_of

Number = float | Sequence[float]


class FusedOptimizer:
    """One of torch's optimizers for all trials of a fused module.

    Each hyperparameter is a number for all trials or one for each; `set` changes them between steps, which
    makes any schedule a vector. Coefficients are float32, or float64 where parameters are, whatever the type
    of the parameters. `clip_norm` limits the norm of each trial's gradients, `steps` the number of its steps:
    a trial that has made its steps does not change any more.
    """

    def __init__(
        self,
        fused: FusedModule,
        kind: str,
        clip_norm: Number | None = None,
        steps: Sequence[int] | None = None,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        self.kind = _find_kind(kind)
        self.fused = fused
        numbers = _split_betas(options)
        _check_options(kind, self.kind, numbers)
        self.common = {name: bool(numbers.pop(name, default)) for name, default in self.kind.common.items()}
        self.parameters = [p for p in fused.module.parameters() if p.requires_grad]
        device = self.parameters[0].device
        wanted = {**self.kind.hyperparameters, **numbers}
        # Kept in float64: they are few, and 1 - beta ** step loses digits in float32.
        self.hyperparameters = {name: self._vector(name, value, device) for name, value in wanted.items()}
        self.clip_norm = None if clip_norm is None else self._vector("clip_norm", clip_norm, device)
        self.steps = torch.zeros(fused.trials, dtype=torch.float64, device=device)
        self.limits = None if steps is None else list(steps)
        self.made = [0] * fused.trials
        self.active: Tensor | None = None
        self._finished: list[int] = []
        self.state = [self._new_state(parameter) for parameter in self.parameters]
        self._update_all = torch.compile(_update_all, dynamic=False) if compiled else _update_all
        self._notice_finished()

    def _vector(self, name: str, value: Number, device: torch.device) -> Tensor:
        numbers = torch.as_tensor(value, dtype=torch.float64).to(device)
        if numbers.dim() and numbers.shape != (self.fused.trials,):
            raise FusionError(
                f"optimizer: {name} has {numbers.numel()} values, expected one, or one for each of the "
                f"{self.fused.trials} trials"
            )
        return numbers.expand(self.fused.trials).clone()

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        names = self.kind.states(self.hyperparameters, self.common)
        state = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        if "initial_accumulator_value" in self.hyperparameters:
            start = self.hyperparameters["initial_accumulator_value"].to(parameter.dtype)
            state["sum"] += start.view(-1, *(1,) * (parameter.dim() - 1))
        return state

    def set(self, **values: Number) -> None:
        """New values of hyperparameters, for the steps to come."""
        for name, value in _split_betas(values).items():
            if name not in self.hyperparameters:
                hint = did_you_mean(name, self.hyperparameters)
                raise FusionError(f"optimizer: no hyperparameter {name!r}{hint}")
            self.hyperparameters[name].copy_(self._vector(name, value, self.steps.device))
        for parameter, state in zip(self.parameters, self.state):
            # A momentum that was zero throughout had no buffer.
            for name, tensor in self._new_state(parameter).items() if "momentum" in values else ():
                state.setdefault(name, tensor)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One step of every trial that has steps left; `skip` marks trials that make none this time."""
        still = self.active if skip is None else ~skip if self.active is None else self.active & ~skip
        updated = [(p, s) for p, s in zip(self.parameters, self.state) if p.grad is not None]
        gradients = [_of_active(p.grad, still) for p, _ in updated if p.grad is not None]
        if self.clip_norm is not None:
            clip_gradients(gradients, self.clip_norm)
        kind = torch.promote_types(self.parameters[0].dtype, torch.float32)
        coefficients = self.kind.coefficients(self.hyperparameters, self.steps)
        coefficients = {name: self._hold(name, c, still).to(kind) for name, c in coefficients.items()}
        self._update_all(
            self.kind, [p for p, _ in updated], gradients, [s for _, s in updated], coefficients, self.common
        )
        self.steps += 1.0 if still is None else still.to(torch.float64)
        self.made = [made + 1 for made in self.made]
        self._notice_finished()

    def _hold(self, name: str, coefficient: Tensor, active: Tensor | None) -> Tensor:
        """What leaves a trial that stands still as it is."""
        if active is None:
            return coefficient
        return torch.where(active, coefficient, 1.0 if name in self.kind.keeping else 0.0)

    def _notice_finished(self) -> None:
        if self.limits is None:
            return
        finished = [n for n, (made, limit) in enumerate(zip(self.made, self.limits)) if made >= limit]
        if finished != self._finished:
            self._finished = finished
            self.active = torch.ones_like(self.steps, dtype=torch.bool)
            self.active[finished] = False
            self.fused.freeze(finished)


def _of_active(gradient: Tensor, active: Tensor | None) -> Tensor:
    """A trial that stands still has no gradient, not even one that is not a number."""
    if active is None:
        return gradient
    kept: Tensor = torch.where(active.view(-1, *(1,) * (gradient.dim() - 1)), gradient, 0.0)
    return kept


def clip_gradients(gradients: Sequence[Tensor], limit: Tensor) -> Tensor:
    """Scale each trial's gradients, in place, to a norm of at most its `limit`; returns the norms before."""
    squares = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
    norms = torch.linalg.vector_norm(squares, dim=0)
    scale = (limit.to(norms.dtype) / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *(1,) * (gradient.dim() - 1)))
    found: Tensor = norms
    return found


def _update_all(
    kind: Kind,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    coefficients: Mapping[str, Tensor],
    common: Mapping[str, bool],
) -> None:
    for parameter, gradient, state in zip(parameters, gradients, states):
        shape = (-1,) + (1,) * (parameter.dim() - 1)
        own = {name: c.view(shape) for name, c in coefficients.items()}
        kind.update(parameter, gradient, state, own, common)


def _find_kind(name: str) -> Kind:
    if name not in KINDS:
        raise FusionError(f"optimizer: no fused {name!r}{did_you_mean(name, KINDS)}")
    return KINDS[name]


def _split_betas(options: Mapping[str, Any]) -> dict[str, Any]:
    """`betas`, a pair or one pair a trial, as `beta1` and `beta2`."""
    numbers = dict(options)
    if "betas" in numbers:
        betas = torch.as_tensor(numbers.pop("betas"), dtype=torch.float64)
        numbers["beta1"], numbers["beta2"] = betas[..., 0], betas[..., 1]
    return numbers


def _check_options(name: str, kind: Kind, options: Mapping[str, Any]) -> None:
    valid = [*kind.hyperparameters, *kind.common]
    for option in options:
        if option not in valid:
            raise FusionError(f"optimizer: {name} takes no {option!r}{did_you_mean(option, valid)}")


def split_optimizer(optimizer: FusedOptimizer, modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Torch's own optimizers with the trials' states, over the modules that `fused.split()` returned."""
    return [_lone_optimizer(optimizer, module, number) for number, module in enumerate(modules)]


def _lone_optimizer(fused: FusedOptimizer, module: nn.Module, number: int) -> torch.optim.Optimizer:
    options: dict[str, Any] = {name: v[number].item() for name, v in fused.hyperparameters.items()}
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    parameters = [p for p in module.parameters() if p.requires_grad]
    make: Any = fused.kind.torch_class
    lone: torch.optim.Optimizer = make(parameters, **options, **fused.common)
    steps = fused.steps[number].item()
    if steps == 0:
        return lone
    for parameter, state in zip(parameters, fused.state):
        own: dict[str, Any] = {name: tensor[number].detach().clone() for name, tensor in state.items()}
        if options.get("momentum", 1.0) == 0.0:
            own.pop("momentum_buffer", None)
        if fused.kind.counts_steps:
            own["step"] = torch.tensor(steps, dtype=torch.float32)
        lone.state[parameter] = own
    return lone


def fuse_optimizers(
    fused: FusedModule, optimizers: Sequence[torch.optim.Optimizer], **options: Any
) -> FusedOptimizer:
    """The states of lone optimizers, at whatever ages, as one optimizer of the fused module."""
    kinds = {kind_of(optimizer) for optimizer in optimizers}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or any(len(o.param_groups) != 1 for o in optimizers):
        raise FusionError(
            f"fuse_optimizers: found {sorted({type(o).__name__ for o in optimizers})}, expected one kind of "
            f"{sorted(KINDS)} with one group of parameters each"
        )
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    names = set(KINDS[kind].hyperparameters) - {"beta1", "beta2"}
    if "betas" in groups[0]:
        names.add("betas")
    vectors: dict[str, Any] = {name: [group[name] for group in groups] for name in names}
    common = {name: groups[0][name] for name in KINDS[kind].common}
    made = FusedOptimizer(fused, kind, **vectors, **common, **options)
    for number, optimizer in enumerate(optimizers):
        _load_trial(made, optimizer, number)
    return made


def _load_trial(fused: FusedOptimizer, optimizer: torch.optim.Optimizer, number: int) -> None:
    parameters = optimizer.param_groups[0]["params"]
    trainable = [p for p in parameters if p.requires_grad]
    if len(trainable) != len(fused.parameters):
        raise FusionError(
            f"fuse_optimizers: trial {number}'s optimizer has {len(trainable)} parameters, expected "
            f"{len(fused.parameters)}"
        )
    for parameter, state in zip(trainable, fused.state):
        own = optimizer.state.get(parameter, {})
        for name, tensor in state.items():
            if own.get(name) is not None:
                tensor[number] = own[name]
        if own:
            fused.steps[number] = float(own.get("step", 1.0))
