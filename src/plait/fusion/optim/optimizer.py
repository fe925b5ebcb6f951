"""Optimizers of a fused module: each trial with its own hyperparameters, steps and gradient clip."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from plait.core.names import did_you_mean
from plait.fusion.dispatch.per_trial import Number
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.optim.kind import OptimizerKind
from plait.fusion.optim.optimizer_kinds import KINDS
from plait.fusion.optim.param_groups import (
    OF_SCHEDULERS,
    FusedGroup,
    check_options,
    check_values,
    plain_value,
)
from plait.fusion.optim.step_clock import ROWS, StepClock
from plait.fusion.optim.step_hooks import hooked_on_demand
from plait.fusion.optim.trial_gradients import clip_gradients, unscale_gradients
from plait.fusion.optim.trial_view import TrialView
from plait.fusion.optim.update import KnownSlices, Stepping, update_group
from plait.fusion.optim.whole_schedulers import select_numbers
from plait.fusion.trials.partial_gradients import trials_without_gradients
from plait.sync.weight_ema import swap_ema


class FusedOptimizer(torch.optim.Optimizer):
    """One of torch's optimizers for all trials of a fused module.

    `kind` is its name in lower case, `options` its hyperparameters. Each is one number or one per trial, also
    in `param_groups`; `set` and torch's learning rate schedulers change them between steps. `params` are the
    fused parameters to optimize, or groups of them as in torch.optim; by default all of them. Coefficients
    are computed in float32, or in float64 for float64 parameters. `clip_norm` limits the norm of each trial's
    gradients, `steps` the number of its steps: after them a trial does not change. Under a
    torch.amp.GradScaler only the trials whose gradients overflow skip a step. With `ema`, the decay of each
    trial, it keeps a moving average of the weights in its state, which `eval` puts in the place of the
    weights until `train`.

    Examples:
        ```python
        fused = plait.fuse([nn.Linear(8, 1) for _ in range(3)])
        optimizer = plait.FusedOptimizer(fused, "adamw", lr=[0.1, 0.03, 0.01])
        x = torch.randn(3, 4, 8)
        fused.map(nn.functional.mse_loss, fused(x), x[..., :1]).sum().backward()
        optimizer.step()
        ```
    """

    # torch.amp.GradScaler then lets `step` decide which trials are updated.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        fused: FusedModule,
        /,
        kind: str,
        clip_norm: Number | None = None,
        steps: Sequence[int] | None = None,
        params: Iterable[Any] | None = None,
        ema: Number | None = None,
        **options: Any,
    ) -> None:
        if kind not in KINDS:
            raise FusionError(f"optimizer: no fused {kind!r}{did_you_mean(kind, KINDS)}")
        self.kind_name = kind
        self.fused = fused
        check_options(kind, options)
        self.check_ranks()
        defaults = {**self.kind.torch_names(), **self.kind.common, **options}
        self._slices: KnownSlices = {}
        # How many parameters of the module have been replaced here.
        self._followed = 0
        self._views: weakref.WeakSet[TrialView] = weakref.WeakSet()
        self.ema = None if ema is None else fused.vector("ema", ema)
        self.clip_norm = None if clip_norm is None else fused.vector("clip_norm", clip_norm)
        # Whether `eval` uses the averages, and whether they are in the place of the weights.
        self.evaluates_ema, self._is_swapped = True, False
        super().__init__(fused.module.parameters() if params is None else params, defaults)
        self.limits = None if steps is None else list(steps)
        self.made = [0] * fused.trials
        self.active: Tensor | None = None
        # Sums squared norms, for clipping, over the workers that hold other stages of the same trials.
        # `counted` are the parameters that this worker adds to them (None: all).
        self.sum_squares: Callable[[Tensor], Tensor] | None = None
        self.counted: Sequence[Tensor] | None = None
        # Which trials skip steps that are not told: those whose gradients overflowed on such workers.
        self.skip: Tensor | None = None
        self._finished: list[int] = []
        self.notice_finished()

    @property
    def kind(self) -> OptimizerKind:
        return KINDS[self.kind_name]

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def parameters(self) -> list[Any]:
        """The fused parameters that require gradients."""
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    @property
    def steps(self) -> Tensor:
        """The steps of each trial: the maximum over its parameters."""
        clocks = [clock.steps for group in self.groups for clock in group.clocks]
        return torch.stack(clocks).amax(0) if clocks else torch.zeros(self.fused.trials, device=self.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients; in torch's way, which takes longer, if a profiler is to see it."""
        self._follow_replaced()
        if not set_to_none or torch.autograd._profiler_enabled():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @hooked_on_demand
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:
        """One step of every trial that has steps left; `skip` marks trials that skip this step."""
        outcome = None
        if closure is not None:
            with torch.enable_grad():
                outcome = closure()
        self.fused.refuse_unfrozen()
        gradients = [p.grad for group in self.groups for p in group["params"] if p.grad is not None]
        skip = _either(self.skip if skip is None else skip, self._overflowed(gradients))
        moving = self.active if skip is None else ~skip if self.active is None else self.active & ~skip
        if self.clip_norm is not None:
            counted = gradients
            if self.counted is not None:
                counted = [p.grad for p in self.counted if p.grad is not None]
            clip_gradients(gradients, self.clip_norm, self.sum_squares, counted)
        for group in self.groups:
            self._step_group(group, Stepping(moving, skip, self._finished))
        if gradients:
            self.made = [made + 1 for made in self.made]
            self.notice_finished()
        self.fused.end_step()
        return outcome

    def _overflowed(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Under a GradScaler, which trials have gradients that are not finite; also unscales the gradients.

        The scaler sets `grad_scale` and `found_inf` as attributes, as for torch's fused optimizers. There is
        no scale if the gradients are already unscaled.
        """
        if getattr(self, "found_inf", None) is None:
            return None
        scale = getattr(self, "grad_scale", None)
        inverse = None if scale is None else scale.double().reciprocal().to(scale.dtype)
        return unscale_gradients(gradients, inverse, self.fused.trials)

    def _step_group(self, group: FusedGroup, stepping: Stepping) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        absent = trials_without_gradients(parameters, self.fused.trials)
        states: list[dict[str, Tensor]] = [self.state[parameter] for parameter in parameters]
        if not all(map(set(group.state_names(parameters[0].dim())).issubset, states)):
            group.begin_anew([parameter for parameter, state in zip(parameters, states) if not state])
            states = [self.state_of(group, parameter) for parameter in parameters]
        gradients: list[Tensor] = [p.grad for p in parameters]
        if group.get("maximize"):
            gradients = list(torch._foreach_neg(gradients))
        clocks = group.clocks_for(parameters, absent)
        updated = list(zip(parameters, gradients, states, clocks))
        update_group(group, updated, absent, stepping, self.ema, self._slices)

    def notice_finished(self) -> None:
        """Freeze the buffers of trials that have done all their steps."""
        if self.limits is None:
            return
        finished = [n for n, (made, limit) in enumerate(zip(self.made, self.limits)) if made >= limit]
        if finished != self._finished:
            self._finished = finished
            self.active = torch.ones(self.fused.trials, dtype=torch.bool, device=self.device)
            self.active[finished] = False
        if finished != self.fused.frozen:
            self.fused.freeze(finished)

    def set(self, **values: Any) -> None:
        """Set hyperparameters in all groups, from the next step on."""
        names = self.kind.torch_names()
        for name, value in values.items():
            if name not in names:
                raise FusionError(f"optimizer: no hyperparameter {name!r}{did_you_mean(name, names)}")
            for group in self.groups:
                group[name] = value

    def trial(self, number: int) -> TrialView:
        """One trial for its own torch.optim.lr_scheduler, which changes the numbers of this trial alone."""
        if not 0 <= number < self.fused.trials:
            raise FusionError(f"optimizer.trial: found {number}, expected 0 to {self.fused.trials - 1}")
        view = next((view for view in self._views if view.number == number), None) or TrialView(self, number)
        self._views.add(view)
        return view

    def _move_views(self, place: Callable[[int], int | None]) -> None:
        for view in self._views:
            view.number = None if view.number is None else place(view.number)

    def eval(self) -> None:
        """Put the moving averages in the place of the weights; without `ema`, nothing changes."""
        self._swap(True)

    def train(self) -> None:
        """Put the weights back that `eval` has taken away."""
        self._swap(False)

    def _swap(self, swapped: bool) -> None:
        if self.evaluates_ema and swapped != self._is_swapped:
            self._is_swapped = swapped
            swap_ema(self)

    @property
    def groups(self) -> list[FusedGroup]:
        """`param_groups`, typed as `FusedGroup`; with the parameters that the module has now."""
        self._follow_replaced()
        return self.param_groups  # type: ignore[return-value]

    def _follow_replaced(self) -> None:
        """Hold the parameters that have taken the place of shared ones, which had no state."""
        replaced = self.fused.replaced
        if len(replaced) != self._followed:
            self._followed = len(replaced)
            for group in self.param_groups:
                cast("FusedGroup", group).replace(replaced)
            for parameter in replaced:
                self.state.pop(parameter, None)

    def _numbered(self) -> list[tuple[FusedGroup, Tensor]]:
        """The parameters in the order of a saved state, each with its group."""
        return [(group, parameter) for group in self.groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of fused parameters (trials axis first) with its hyperparameters."""
        self._follow_replaced()  # else one that was shared would be in two groups
        super().add_param_group(dict(param_group))
        given = self.param_groups.pop()
        check_options(self.kind_name, given, ("params", "param_names", *OF_SCHEDULERS))
        shared = self.fused.shared_ids()
        for parameter in given["params"]:
            if id(parameter) in shared:  # frozen, so never updated
                continue
            if parameter.dim() == 0 or parameter.shape[0] != self.fused.trials:
                raise FusionError(
                    f"optimizer: found a parameter of shape {tuple(parameter.shape)}, expected one of the "
                    f"fused module's, with its {self.fused.trials} trials first: fused.module.parameters()"
                )
        like = given["params"][0] if given["params"] else torch.empty(0, device=self.fused.seeds.device)
        trials, keeps_ema = self.fused.trials, self.ema is not None
        group = FusedGroup(self.kind_name, trials, like.device, like.dtype, keeps_ema)
        group.update(given)
        check_values(group)
        self.param_groups.append(group)
        for parameter in given["params"]:
            # Now, as a CUDA graph would reset the state at each replay if it were created during capture.
            if parameter.requires_grad and id(parameter) not in shared:
                self.state_of(group, parameter)

    def state_of(self, group: FusedGroup, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, created if there is none.

        A parameter may have been frozen until now, and without momentum there is no buffer.
        """
        if objection := self.kind.objection(parameter):
            raise FusionError(f"optimizer: {self.kind_name} found {objection}")
        state: dict[str, Tensor] = self.state[parameter]
        for name in group.state_names(parameter.dim()):
            if name not in state:
                if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise FusionError(
                        f"optimizer: a parameter of shape {tuple(parameter.shape)} has no state while a "
                        f"CUDA graph is captured; take a step before"
                    )
                state[name] = group.first_state(parameter, name)
        return state

    def check_ranks(self) -> None:
        """Refuse adapters that are padded with zeros if these would change the update of other elements."""
        if self.fused.forms.has_unlike_ranks and not self.kind.is_elementwise:
            raise FusionError(
                f"optimizer: {self.kind_name} computes with whole matrices, and these adapters have unlike "
                f"ranks, which are padded with zeros; use another optimizer, or fuse the adapters of each "
                f"rank by themselves"
            )

    def forget_trial(self, number: int) -> None:
        """Reset a trial: no steps, no state."""
        for group, parameter in self._numbered():
            for name, state in self.state.get(parameter, {}).items():
                state[number] = group.first_state(parameter, name)[number]
        for group in self.groups:
            group.forget(number)
        self._move_views(lambda before: None if before == number else before)
        self.made[number] = 0

    def select(self, index: Tensor) -> None:
        """Select trials by their numbers, in this order."""
        numbers = index.tolist()
        for group in self.groups:
            group.select(index)
        select_numbers(self, numbers)
        for state in self.state.values():
            state.update({name: tensor[index] for name, tensor in state.items()})
        for name in ("ema", "clip_norm", "active"):
            vector = getattr(self, name)
            setattr(self, name, None if vector is None else vector[index])
        self.made = [self.made[number] for number in numbers]
        self.limits = None if self.limits is None else [self.limits[number] for number in numbers]
        self._slices.clear()
        places = {before: now for now, before in reversed([*enumerate(numbers)])}
        self._move_views(places.get)
        self.notice_finished()

    def state_dict(self) -> dict[str, Any]:
        """All state that a restart needs besides the constructor arguments."""
        self._follow_replaced()
        packed: dict[str, Any] = super().state_dict()
        packed["param_groups"] = [
            {name: plain_value(value) for name, value in group.items()} for group in packed["param_groups"]
        ]
        packed["state"] = {number: dict(state) for number, state in packed["state"].items()}
        for number, (group, parameter) in enumerate(self._numbered()):
            clock = group.counts(parameter)
            packed["state"].setdefault(number, {}).update(zip(ROWS, clock.rows))
        return {**packed, "made": list(self.made)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; the numbers of trials, groups and parameters must be equal."""
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(group["params"]) for group in self.groups]
        if sizes != expected or len(state_dict["made"]) != self.fused.trials:
            raise FusionError(
                f"optimizer: found the state of {len(state_dict['made'])} trials and groups of {sizes} "
                f"parameters, expected {self.fused.trials} trials and {expected}"
            )
        for group, saved in zip(self.groups, state_dict["param_groups"]):
            group.update({name: value for name, value in saved.items() if name != "params"})
        counts: dict[int, dict[Tensor, Any]] = {}
        for number, (group, parameter) in enumerate(self._numbered()):
            given = dict(state_dict["state"][number])
            start = dict(zip(ROWS, StepClock.new(self.fused.trials, torch.device("cpu")).rows))
            rows = [given.pop(name, start[name]).tolist() for name in ROWS]
            counts.setdefault(id(group), {})[parameter] = rows
            state = self.state[parameter]
            for name, tensor in given.items():
                # If momentum was set after the start, the state has a buffer that a new optimizer does not
                # have.
                state.setdefault(name, torch.empty_like(tensor, device=parameter.device)).copy_(tensor)
        for group in self.groups:
            group.set_counts(counts.get(id(group), {}))
        self.made = list(state_dict["made"])
        self.notice_finished()

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without caches; hooks are dropped, as in torch.

        So is the `step` that a scheduler has put in the place of this one, whose steps it would take.
        """
        dropped = ("_optimizer_", "_slices", "_views")
        return {n: value for n, value in self.__dict__.items() if n != "step" and not n.startswith(dropped)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_slices": {}, "_views": weakref.WeakSet()})


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one | other
