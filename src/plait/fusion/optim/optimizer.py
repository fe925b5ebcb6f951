"""Optimizers of a fused module: each trial with its own hyperparameters, steps and gradient clip."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.core.names import did_you_mean
from plait.fusion.errors import FusionError
from plait.fusion.kernels import can_run_on
from plait.fusion.module import FusedModule
from plait.fusion.optim.updates import KINDS, OptimizerKind, UpdateTensors, kind_of
from plait.fusion.trials.unfused import trials_without_gradient

Number = float | Sequence[float] | Tensor
# The parameters that have a gradient, with their states.
Updated = list[tuple[Tensor, dict[str, Tensor]]]


# Trials' views of the parameters, of each state by name, and of the steps of each parameter.
Slices = tuple[list[tuple[Tensor, ...]], dict[str, list[tuple[Tensor, ...]]], list[tuple[Tensor, ...]]]

_WHOLE = (torch.float32, torch.float64)


@dataclass
class StepClock:
    """The steps of parameters that always moved together: one number a trial.

    A parameter without a gradient does not move, and its corrections for the first steps come later.
    `pushes` are the steps with momentum, of which the first fills the buffer.
    """

    steps: Tensor
    pushes: Tensor

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StepClock:
        return StepClock(change(self.steps), change(self.pushes))

    def advance(self, moving: Tensor | None, momentum: Tensor | None) -> None:
        self.steps += 1.0 if moving is None else moving
        if momentum is not None:
            pushed = momentum != 0
            self.pushes += pushed if moving is None else pushed & moving


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
        self.numbers = {name: self._one_each(name, value) for name, value in wanted.items()}
        # Kept in float64: they are few, and 1 - beta ** step loses digits in float32.
        self.hyperparameters = {name: _vector(values, device) for name, values in self.numbers.items()}
        limits = None if clip_norm is None else self._one_each("clip_norm", clip_norm)
        self.clip_norm = None if limits is None else _vector(limits, device)
        zeros = torch.zeros(fused.trials, dtype=torch.float32, device=device)
        self.clocks = [StepClock(zeros, zeros.clone())]
        self.clock_of = [0] * len(self.parameters)
        self.limits = None if steps is None else list(steps)
        self.made = [0] * fused.trials
        self.active: Tensor | None = None
        # Adds up, for clipping, what the holders of other parts of the same trials have: squared norms.
        self.sum_squares: Callable[[Tensor], Tensor] | None = None
        self._finished: list[int] = []
        self._slices: tuple[Any, Slices] | None = None
        self.state = [self._new_state(parameter) for parameter in self.parameters]
        self.notice_finished()

    @property
    def steps(self) -> Tensor:
        """How many steps each trial has made: the most that one of its parameters moved."""
        return torch.stack([clock.steps for clock in self.clocks]).amax(0)

    @property
    def device(self) -> torch.device:
        return self.clocks[0].steps.device

    def _one_each(self, name: str, value: Number) -> list[float]:
        """The value of each trial, from one for all or one each."""
        values = value.tolist() if isinstance(value, Tensor) else value
        if isinstance(values, (int, float)):
            return [float(values)] * self.fused.trials
        if len(values) != self.fused.trials:
            raise FusionError(
                f"optimizer: {name} has {len(values)} values, expected one, or one for each of the "
                f"{self.fused.trials} trials"
            )
        return [float(one) for one in values]

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        names = self.kind.states(self.numbers, self.common)
        state = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        if "initial_accumulator_value" in self.hyperparameters:
            start = self.hyperparameters["initial_accumulator_value"]
            start = (torch.complex(start, start) if parameter.is_complex() else start).to(parameter.dtype)
            state["sum"] += start.view(-1, *(1,) * (parameter.dim() - 1))
        return state

    def set(self, **values: Number) -> None:
        """New values of hyperparameters, for the steps to come."""
        for name, value in _split_betas(values).items():
            if name not in self.hyperparameters:
                hint = did_you_mean(name, self.hyperparameters)
                raise FusionError(f"optimizer: no hyperparameter {name!r}{hint}")
            self.numbers[name] = self._one_each(name, value)
            self.hyperparameters[name].copy_(_vector(self.numbers[name], torch.device("cpu")))
        for parameter, state in zip(self.parameters, self.state):
            # A momentum that was zero throughout had no buffer.
            for name, tensor in self._new_state(parameter).items() if "momentum" in values else ():
                state.setdefault(name, tensor)

    def state_dict(self) -> dict[str, Any]:
        """All that a restart needs besides the arguments the optimizer was made with."""
        return {
            "state": self.state,
            "clocks": [(clock.steps, clock.pushes) for clock in self.clocks],
            "clock_of": list(self.clock_of),
            "made": list(self.made),
            "numbers": {name: list(values) for name, values in self.numbers.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the trials must be as many."""
        self.set(**saved["numbers"])
        for own, other, parameter in zip(self.state, saved["state"], self.parameters, strict=True):
            for name, tensor in other.items():
                # A momentum that has been set since the start has a buffer that a new optimizer has not.
                own.setdefault(name, torch.zeros_like(parameter, requires_grad=False)).copy_(tensor)
        self.clocks = [
            StepClock(*(part.to(self.device, copy=True) for part in pair)) for pair in saved["clocks"]
        ]
        self.clock_of = list(saved["clock_of"])
        self.made = list(saved["made"])
        self.notice_finished()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """One step of every trial that has steps left; `skip` marks trials that make none this time."""
        moving = self.active if skip is None else ~skip if self.active is None else self.active & ~skip
        with_gradient = [number for number, p in enumerate(self.parameters) if p.grad is not None]
        updated: Updated = [(self.parameters[number], self.state[number]) for number in with_gradient]
        gradients = [p.grad for p, _ in updated if p.grad is not None]
        if self.clip_norm is not None:
            clip_gradients(gradients, self.clip_norm, self.sum_squares)
        if self.common["maximize"]:
            gradients = [-gradient for gradient in gradients]
        count = self.fused.trials
        absent = {n: trials_without_gradient(self.parameters[n], count) for n in with_gradient}
        clocks = self._clocks_of(absent)
        kept = self._kept(absent)
        if self._has_kernel() and not self._in_one_pass():
            self._advance(clocks, moving)
            self._step_by_kernel(updated, gradients, clocks, skip)
        else:
            self._step_by_vectors(updated, gradients, clocks, moving)
            self._advance(clocks, moving)
        for tensor, trials, before in kept:
            tensor[list(trials)] = before
        self.made = [made + 1 for made in self.made]
        self.notice_finished()

    def _clocks_of(self, absent: Mapping[int, tuple[int, ...]]) -> list[StepClock]:
        """The clock of each parameter that moves now, without the trials that `absent` gives for it.

        Parameters that moved together so far and do so no more get clocks of their own.
        """
        if len(self.clocks) == 1 and len(absent) == len(self.parameters) and not any(absent.values()):
            return [self.clocks[0]] * len(absent)
        for clock in range(len(self.clocks)):
            members = [number for number, own in enumerate(self.clock_of) if own == clock]
            kinds = list(dict.fromkeys(absent.get(number) for number in members))
            for kind in kinds[1:]:
                self.clocks.append(self.clocks[clock].mapped(torch.clone))
                for number in members:
                    if absent.get(number) == kind:
                        self.clock_of[number] = len(self.clocks) - 1
        return [self.clocks[self.clock_of[number]] for number in absent]

    def _kept(self, absent: Mapping[int, tuple[int, ...]]) -> list[tuple[Tensor, tuple[int, ...], Tensor]]:
        """What must stay as it is: parameters, states and clocks of trials without a gradient this time."""
        if not any(absent.values()):
            return []
        found: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        for number, trials in absent.items():
            if not trials:
                continue
            clock = self.clocks[self.clock_of[number]]
            for tensor in (self.parameters[number], *self.state[number].values(), clock.steps, clock.pushes):
                found[id(tensor)] = tensor, trials
        return [(tensor, trials, tensor[list(trials)].clone()) for tensor, trials in found.values()]

    def _advance(self, clocks: list[StepClock], moving: Tensor | None) -> None:
        for clock in _distinct(clocks):
            clock.advance(moving, self.hyperparameters.get("momentum"))

    def _has_kernel(self) -> bool:
        # On the CPU torch's kernels leave bfloat16 parameters unchanged (seen with 2.13); on a GPU they take
        # learning rates in float32, which is too coarse for float64.
        kinds = {p.dtype for p in self.parameters}
        whole = torch.float64 not in kinds if self.device.type == "cuda" else kinds.issubset(_WHOLE)
        whole = whole and not any(kind.is_complex for kind in kinds)
        return self.kind.kernel is not None and whole and not any(self.numbers.get("dampening", ()))

    def _in_one_pass(self) -> bool:
        """Whether a kernel of ours updates all trials of a parameter at once."""
        known = self.kind.one_pass is not None and not self.common.get("amsgrad", False)
        return known and all(p.dtype == torch.float32 and can_run_on(p) for p in self.parameters)

    def _step_by_kernel(
        self, updated: Updated, gradients: list[Tensor], clocks: list[StepClock], skip: Tensor | None
    ) -> None:
        """Trial by trial, each in one pass over its memory, by torch's own kernels."""
        assert self.kind.kernel is not None
        parameters, states, steps = self._slices_of(updated, clocks)
        slices = [g.unbind() for g in gradients]
        rates = self.hyperparameters["lr"].to(torch.float32).unbind() if self.device.type == "cuda" else None
        infs = None if skip is None else skip.to(torch.float32).unbind()
        for trial in range(self.fused.trials):
            if trial in self._finished:
                continue
            pieces = UpdateTensors(
                [p[trial] for p in parameters],
                [g[trial] for g in slices],
                {name: [part[trial] for part in parts] for name, parts in states.items()},
                [part[trial] for part in steps],
                self.numbers["lr"][trial] if rates is None else rates[trial],
                {name: values[trial] for name, values in self.numbers.items()},
                self.common,
                None if infs is None else infs[trial],
            )
            self.kind.kernel(pieces)

    def _slices_of(self, updated: Updated, clocks: list[StepClock]) -> Slices:
        """Each trial's part of parameters, states and steps; views, kept while what they view stays."""
        key = [(p.data_ptr(), id(clock), *map(id, s.values())) for (p, s), clock in zip(updated, clocks)]
        if self._slices is None or self._slices[0] != key:
            steps = {id(clock): clock.steps.unbind() for clock in clocks}
            names = updated[0][1] if updated else {}
            parts = (
                [p.detach().unbind() for p, _ in updated],
                {name: [s[name].unbind() for _, s in updated] for name in names},
                [steps[id(clock)] for clock in clocks],
            )
            self._slices = (key, parts)
        return self._slices[1]

    def _step_by_vectors(
        self, updated: Updated, gradients: list[Tensor], clocks: list[StepClock], moving: Tensor | None
    ) -> None:
        """All trials at once, the coefficients broadcast over each parameter, or in one pass by a kernel."""
        tables = {id(clock): self._coefficients(clock, moving) for clock in _distinct(clocks)}
        in_one_pass = self._in_one_pass()
        for (parameter, state), gradient, clock in zip(updated, gradients, clocks):
            gradient, table = _of_active(gradient, moving), tables[id(clock)]
            if in_one_pass and self.kind.one_pass is not None:
                self.kind.one_pass(parameter, gradient, state, table, self.common)
                continue
            if parameter.is_complex():  # as torch's optimizers: real and imaginary parts on their own
                parameter, gradient = torch.view_as_real(parameter), torch.view_as_real(gradient)
                state = {name: torch.view_as_real(value) for name, value in state.items()}
            rows = table.view(*table.shape, *(1,) * (parameter.dim() - 1)).unbind()
            own = dict(zip(self.kind.coefficient_names, rows, strict=True))
            self.kind.update(parameter, gradient, state, own, self.common)

    def _coefficients(self, clock: StepClock, moving: Tensor | None) -> Tensor:
        """The coefficients of this step: a row for each of the kind's names, a column for each trial.

        Computed once for all parameters that share a clock, and cast as one tensor: on a GPU each operation
        on these few numbers costs as much time as one on a small weight.
        """
        precision = torch.float32
        for kind in {parameter.dtype.to_real() for parameter in self.parameters}:
            precision = torch.promote_types(precision, kind)
        steps = clock.steps if self.kind.counts_steps else clock.pushes
        found = self.kind.coefficients(self.hyperparameters, steps.to(torch.float64))
        table = torch.stack([found[name] for name in self.kind.coefficient_names]).to(precision)
        if moving is None:
            return table
        # What leaves a trial that stands still as it is; made without a copy from the host, which no CUDA
        # graph could hold.
        kept = torch.zeros_like(table[:, :1])
        for row, name in enumerate(self.kind.coefficient_names):
            if name in self.kind.keeping:
                kept[row].fill_(1.0)
        return torch.where(moving, table, kept)

    def forget_trial(self, number: int) -> None:
        """Begin a trial anew: no steps, no state."""
        for parameter, state in zip(self.parameters, self.state):
            for name, fresh in self._new_state(parameter).items():
                state[name][number] = fresh[number]
        for clock in self.clocks:
            clock.steps[number] = clock.pushes[number] = 0.0
        self.made[number] = 0

    def notice_finished(self) -> None:
        """Let trials that have made their steps stand still from now on."""
        if self.limits is None:
            return
        finished = [n for n, (made, limit) in enumerate(zip(self.made, self.limits)) if made >= limit]
        if finished != self._finished:
            self._finished = finished
            self.active = torch.ones_like(self.clocks[0].steps, dtype=torch.bool)
            self.active[finished] = False
        if finished != self.fused.frozen:
            self.fused.freeze(finished)


def _distinct(clocks: Sequence[StepClock]) -> list[StepClock]:
    """Each clock once: parameters that move together share theirs."""
    return list({id(clock): clock for clock in clocks}.values())


def _of_active(gradient: Tensor, active: Tensor | None) -> Tensor:
    """A trial that stands still has no gradient, not even one that is not a number."""
    if active is None:
        return gradient
    kept: Tensor = torch.where(active.view(-1, *(1,) * (gradient.dim() - 1)), gradient, 0.0)
    return kept


def clip_gradients(
    gradients: Sequence[Tensor], limit: Tensor, sum_squares: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scale each trial's gradients, in place, to a norm of at most its `limit`; returns the norms before.

    `sum_squares` adds to the squared norms those of gradients that others hold.
    """
    each = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
    norms = torch.linalg.vector_norm(each, dim=0)
    if sum_squares is not None:
        norms = sum_squares(norms.square()).sqrt()
    scale = (limit.to(norms.dtype) / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *(1,) * (gradient.dim() - 1)))
    found: Tensor = norms
    return found


def _find_kind(name: str) -> OptimizerKind:
    if name not in KINDS:
        raise FusionError(f"optimizer: no fused {name!r}{did_you_mean(name, KINDS)}")
    return KINDS[name]


def _vector(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _split_betas(options: Mapping[str, Any]) -> dict[str, Any]:
    """`betas`, a pair or one pair a trial, as `beta1` and `beta2`."""
    numbers = dict(options)
    if "betas" in numbers:
        betas = numbers.pop("betas")
        pairs = betas if isinstance(betas[0], (tuple, list)) else [betas]
        first, second = ([pair[place] for pair in pairs] for place in (0, 1))
        is_one = pairs is not betas
        numbers["beta1"], numbers["beta2"] = (first[0], second[0]) if is_one else (first, second)
    return numbers


def _check_options(name: str, kind: OptimizerKind, options: Mapping[str, Any]) -> None:
    valid = [*kind.hyperparameters, *kind.common]
    for option in options:
        if option not in valid:
            raise FusionError(f"optimizer: {name} takes no {option!r}{did_you_mean(option, valid)}")


def split_optimizer(optimizer: FusedOptimizer, modules: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """Torch's own optimizers with the trials' states, over the modules that `fused.split()` returned."""
    return [lone_optimizer(optimizer, module, number) for number, module in enumerate(modules)]


def lone_optimizer(fused: FusedOptimizer, module: nn.Module, number: int) -> torch.optim.Optimizer:
    """Torch's own optimizer with one trial's state, over the module that `fused.trial(number)` returned."""
    options: dict[str, Any] = {name: v[number].item() for name, v in fused.hyperparameters.items()}
    if "beta1" in options:
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    parameters = [p for p in module.parameters() if p.requires_grad]
    make: Any = fused.kind.torch_class
    lone: torch.optim.Optimizer = make(parameters, **options, **fused.common)
    for parameter, state, place in zip(parameters, fused.state, fused.clock_of):
        clock = fused.clocks[place]
        steps = (clock.steps if fused.kind.counts_steps else clock.pushes)[number].item()
        if steps == 0:
            continue
        own: dict[str, Any] = {name: tensor[number].detach().clone() for name, tensor in state.items()}
        if fused.kind.counts_steps:
            own["step"] = torch.tensor(steps, dtype=torch.float32)
            if options.get("momentum", 1.0) == 0.0:
                own.pop("momentum_buffer", None)
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
    if kind == "adam" and _common_switch("decoupled_weight_decay", groups):
        kind = "adamw"
    switches = {name: _common_switch(name, groups) for name in KINDS[kind].common}
    made = FusedOptimizer(fused, kind, **{**vectors, **switches, **options})
    for number, optimizer in enumerate(optimizers):
        load_trial(made, optimizer, number)
    return made


def _common_switch(name: str, groups: Sequence[Mapping[str, Any]]) -> bool:
    """A switch that all trials must have alike, since one formula computes them all."""
    found = [bool(group.get(name, False)) for group in groups]
    if len(set(found)) > 1:
        raise FusionError(
            f"fuse_optimizers: found {name} = {found}, expected one value for all trials; fuse those with "
            f"equal ones together"
        )
    return found[0]


@torch.no_grad()
def load_trial(fused: FusedOptimizer, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Give one trial the state of a lone optimizer, over a model with the trial's parameters."""
    parameters = optimizer.param_groups[0]["params"]
    trainable = [p for p in parameters if p.requires_grad]
    if len(trainable) != len(fused.parameters):
        raise FusionError(
            f"fuse_optimizers: trial {number}'s optimizer has {len(trainable)} parameters, expected "
            f"{len(fused.parameters)}"
        )
    if not optimizer.state:
        fused.forget_trial(number)
        return
    places = _places(fused, trainable, number)
    rows = [[clock.steps.tolist(), clock.pushes.tolist()] for clock in fused.clocks]
    counts = [copy.deepcopy(rows[place]) for place in fused.clock_of]
    for parameter, place in zip(trainable, places):
        own, state = optimizer.state.get(parameter, {}), fused.state[place]
        for name, tensor in state.items():
            if own.get(name) is not None:
                tensor[number] = own[name]
        pushed = float(own.get("momentum_buffer") is not None)
        counts[place][0][number] = float(own.get("step", pushed))
        counts[place][1][number] = pushed
    _set_clocks(fused, counts)


def _places(fused: FusedOptimizer, parameters: Sequence[Tensor], number: int) -> list[int]:
    """Which of the fused parameters each of a lone model's is: the first free one with the same values."""
    free = list(range(len(fused.parameters)))
    places = []
    for position, parameter in enumerate(parameters):
        order = sorted(free, key=lambda place: place != position)
        same = [place for place in order if _is_same(fused.parameters[place][number], parameter)]
        if not same:
            raise FusionError(
                f"fuse_optimizers: parameter {position} of trial {number}'s optimizer, of shape "
                f"{tuple(parameter.shape)}, has the values of none of the fused trial's; expected the "
                f"optimizer of the very model that was fused, as it was then"
            )
        places.append(same[0])
        free.remove(same[0])
    return places


def _is_same(own: Tensor, other: Tensor) -> bool:
    return own.shape == other.shape and bool(((own == other.to(own)) | own.isnan()).all())


def _set_clocks(fused: FusedOptimizer, counts: list[list[list[float]]]) -> None:
    """Let parameters with equal counts of steps share a clock."""
    distinct: list[list[list[float]]] = []
    for count in counts:
        if count not in distinct:
            distinct.append(count)
    fused.clocks = [
        StepClock(*(torch.tensor(part, dtype=torch.float32, device=fused.device) for part in count))
        for count in distinct
    ]
    fused.clock_of = [distinct.index(count) for count in counts]
