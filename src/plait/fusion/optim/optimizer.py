"""Optimizers of a fused module: each trial with its own hyperparameters, steps and gradient clip."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from plait.core.names import did_you_mean
from plait.fusion.errors import FusionError
from plait.fusion.kernels import can_run_on
from plait.fusion.module import FusedModule
from plait.fusion.optim.kind import OptimizerKind, UpdateTensors
from plait.fusion.optim.optimizer_kinds import KINDS
from plait.fusion.optim.param_groups import FusedGroup, check_options, check_values
from plait.fusion.optim.step_clock import ROWS, StepClock, distinct
from plait.fusion.optim.trial_gradients import clip_gradients, unscale_gradients
from plait.fusion.optim.trial_view import TrialView
from plait.fusion.trials.per_trial import Number, PerTrial, one_each
from plait.fusion.trials.unfused import trials_without_gradients
from plait.sync.weight_ema import EMA, swap_ema

# The parameters that have a gradient, with their states.
Updated = list[tuple[Tensor, dict[str, Tensor]]]
# A parameter, its gradient and its states.
Tensors = tuple[Tensor, Tensor, dict[str, Tensor]]
# Per-trial views of the parameters, of each state by name, and of the steps of each parameter.
Slices = tuple[list[tuple[Tensor, ...]], dict[str, list[tuple[Tensor, ...]]], list[tuple[Tensor, ...]]]

_WHOLE = (torch.float32, torch.float64)
# The most elements of a parameter that is updated together with others; on a GPU, a pass over as many takes
# about as long as a launch.
_SMALL = {False: 2**14, True: 2**20}
# Keys that a scheduler adds to a group.
_OF_SCHEDULERS = (
    "params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
    "initial_momentum",
)  # fmt: skip
_Step = TypeVar("_Step", bound=Callable[..., Any])


def _hooked_on_demand(step: _Step) -> _Step:
    """`step`, in torch's wrapper only if there are hooks to call or a profiler is to see the step.

    The wrapper takes a time that counts in a step of a small model on a CPU.
    """
    hooked = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def either(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
        is_hooked = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )
        return (hooked if is_hooked else step)(self, *args, **kwargs)

    # Torch then adds no wrapper.
    either.hooked = True  # type: ignore[attr-defined]
    return cast("_Step", either)


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
        self._slices: dict[int, tuple[Any, Slices]] = {}
        # How many parameters of the module have been replaced here.
        self._followed = 0
        self._views: list[weakref.ref[TrialView]] = []
        decays = None if ema is None else one_each("ema", ema, fused.trials)
        self.ema = None if decays is None else torch.tensor(decays, dtype=torch.float64)
        # Whether `eval` uses the averages, and whether they are in the place of the weights.
        self.evaluates_ema, self._is_swapped = True, False
        super().__init__(fused.module.parameters() if params is None else params, defaults)
        self.ema = None if self.ema is None else self.ema.to(self.device)
        limits = None if clip_norm is None else one_each("clip_norm", clip_norm, fused.trials)
        self.clip_norm = None if limits is None else torch.tensor(limits, dtype=torch.float64).to(self.device)
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

    def check_ranks(self) -> None:
        """Refuse adapters that are padded with zeros if these would change the update of other elements."""
        if self.fused.forms.has_unlike_ranks and not self.kind.is_elementwise:
            raise FusionError(
                f"optimizer: {self.kind_name} computes with whole matrices, and these adapters have unlike "
                f"ranks, which are padded with zeros; use another optimizer, or fuse the adapters of each "
                f"rank by themselves"
            )

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

    @property
    def parameters(self) -> list[Any]:
        """The fused parameters that require gradients."""
        return [p for group in self.groups for p in group["params"] if p.requires_grad]

    @property
    def steps(self) -> Tensor:
        """The steps of each trial: the maximum over its parameters."""
        clocks = [clock.steps for group in self.groups for clock in group.clocks]
        return torch.stack(clocks).amax(0) if clocks else torch.zeros(self.fused.trials, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of fused parameters (trials axis first) with its hyperparameters."""
        self._follow_replaced()  # else one that was shared would be in two groups
        super().add_param_group(dict(param_group))
        given = self.param_groups.pop()
        check_options(self.kind_name, given, _OF_SCHEDULERS)
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
        group = FusedGroup(self.kind_name, self.fused.trials, like.device, like.dtype)
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
        for name in self._state_names(group, parameter.dim()):
            if name not in state:
                if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise FusionError(
                        f"optimizer: a parameter of shape {tuple(parameter.shape)} has no state while a "
                        f"CUDA graph is captured; take a step before"
                    )
                state[name] = _first_state(group, parameter, name)
        return state

    def _state_names(self, group: FusedGroup, dims: int) -> tuple[str, ...]:
        return (*group.state_names(dims), *(() if self.ema is None else (EMA,)))

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
        view = next((view for view in self._live_views() if view.number == number), None)
        if view is None:
            view = TrialView(self, number)
            self._views.append(weakref.ref(view))
        return view

    def _live_views(self) -> list[TrialView]:
        views = [(view, reference) for reference in self._views if (view := reference()) is not None]
        self._views = [reference for _, reference in views]
        return [view for view, _ in views]

    def state_dict(self) -> dict[str, Any]:
        """All state that a restart needs besides the constructor arguments."""
        self._follow_replaced()
        packed: dict[str, Any] = super().state_dict()
        packed["param_groups"] = [
            {name: _plain(value) for name, value in group.items()} for group in packed["param_groups"]
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

    def _numbered(self) -> list[tuple[FusedGroup, Tensor]]:
        """The parameters in the order of a saved state, each with its group."""
        return [(group, parameter) for group in self.groups for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without caches; hooks are dropped, as in torch."""
        return {
            name: value for name, value in self.__dict__.items() if not name.startswith("_optimizer_")
        } | {"_slices": {}, "_views": []}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients; in torch's way, which takes longer, if a profiler is to see it."""
        self._follow_replaced()
        if not set_to_none or torch.autograd._profiler_enabled():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @_hooked_on_demand
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
            self._step_group(group, moving, skip)
        if gradients:
            self.made = [made + 1 for made in self.made]
            self.notice_finished()
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

    def _step_group(self, group: FusedGroup, moving: Tensor | None, skip: Tensor | None) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        absent = trials_without_gradients(parameters, self.fused.trials)
        states: list[dict[str, Tensor]] = [self.state[parameter] for parameter in parameters]
        if not all(map(set(self._state_names(group, parameters[0].dim())).issubset, states)):
            states = [self.state_of(group, parameter) for parameter in parameters]
        updated: Updated = list(zip(parameters, states))
        gradients: list[Tensor] = [p.grad for p in parameters]
        if group.get("maximize"):
            gradients = list(torch._foreach_neg(gradients))
        clocks = group.clocks_for(parameters, absent)
        kept = _kept(updated, absent, clocks)
        if _has_kernel(group, parameters) and not _in_one_pass(group, parameters):
            _advance(group, clocks, moving)
            self._step_by_kernel(group, updated, gradients, clocks, skip)
        else:
            _step_by_vectors(group, updated, gradients, clocks, moving)
            _advance(group, clocks, moving)
        if self.ema is not None:
            _update_ema(updated, self.ema, moving)
        for tensor, trials, before in kept:
            tensor[list(trials)] = before

    def _step_by_kernel(
        self,
        group: FusedGroup,
        updated: Updated,
        gradients: list[Tensor],
        clocks: list[StepClock],
        skip: Tensor | None,
    ) -> None:
        """Step trial by trial with torch's fused kernels, each in one pass over memory."""
        kernel = group.kind.kernel
        assert kernel is not None
        parameters, states, steps = self._slices_of(group, updated, clocks)
        slices = [g.unbind() for g in gradients]
        on_gpu = group.device.type == "cuda"
        rates = group.vectors["lr"].to(torch.float32).unbind() if on_gpu else None
        infs = None if skip is None else skip.to(torch.float32).unbind()
        for trial in range(self.fused.trials):
            if trial in self._finished:
                continue
            kernel(
                UpdateTensors(
                    [p[trial] for p in parameters],
                    [g[trial] for g in slices],
                    {name: [part[trial] for part in parts] for name, parts in states.items()},
                    [part[trial] for part in steps],
                    group.numbers["lr"][trial] if rates is None else rates[trial],
                    {name: values[trial] for name, values in group.numbers.items()},
                    group.switches,
                    None if infs is None else infs[trial],
                )
            )

    def _slices_of(self, group: FusedGroup, updated: Updated, clocks: list[StepClock]) -> Slices:
        """Each trial's views of parameters, states and steps; cached while the tensors do not change."""
        key = [(p.data_ptr(), *map(id, (clock, *s.values()))) for (p, s), clock in zip(updated, clocks)]
        known = self._slices.get(id(group))
        if known is None or known[0] != key:
            steps = {id(clock): clock.steps.unbind() for clock in clocks}
            names = updated[0][1] if updated else {}
            parts = (
                [p.detach().unbind() for p, _ in updated],
                {name: [s[name].unbind() for _, s in updated] for name in names},
                [steps[id(clock)] for clock in clocks],
            )
            known = self._slices[id(group)] = (key, parts)
        return known[1]

    def forget_trial(self, number: int) -> None:
        """Reset a trial: no steps, no state."""
        for group, parameter in self._numbered():
            for name, state in self.state.get(parameter, {}).items():
                state[number] = _first_state(group, parameter, name)[number]
        for group in self.groups:
            group.forget(number)
        self._move_views(lambda before: None if before == number else before)
        self.made[number] = 0

    def _move_views(self, place: Callable[[int], int | None]) -> None:
        for view in self._live_views():
            view.number = None if view.number is None else place(view.number)

    def rewrite(self, change: Callable[[Tensor], Tensor], numbers: Sequence[int]) -> None:
        """Select the trials `numbers`, in this order; `change` does the same to a tensor."""
        for group in self.groups:
            group.rewrite(change, numbers)
        for state in self.state.values():
            state.update({name: change(tensor) for name, tensor in state.items()})
        if self.ema is not None:
            self.ema = self.ema[list(numbers)]
        for name in ("clip_norm", "active"):
            vector = getattr(self, name)
            setattr(self, name, None if vector is None else change(vector))
        self.made = [self.made[number] for number in numbers]
        self.limits = None if self.limits is None else [self.limits[number] for number in numbers]
        self._slices.clear()
        places = {before: now for now, before in reversed([*enumerate(numbers)])}
        self._move_views(places.get)
        self.notice_finished()

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


def _plain(value: Any) -> Any:
    """A group's value for a saved state: a number, or a list of them if trials differ."""
    if isinstance(value, tuple) and any(isinstance(one, PerTrial) for one in value):
        trials = next(len(one.values) for one in value if isinstance(one, PerTrial))
        return [list(pair) for pair in zip(*(one_each("", one, trials) for one in value))]
    return list(value.values) if isinstance(value, PerTrial) else value


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one | other


def _update_ema(updated: Updated, decays: Tensor, moving: Tensor | None) -> None:
    """Move the averages towards the weights, by one minus the decay of each trial; of those that moved."""
    for parameter, state in updated:
        weights = (1.0 - decays).to(parameter.device, parameter.dtype.to_real())
        weights = weights if moving is None else torch.where(moving, weights, 0.0)
        state[EMA].lerp_(parameter.detach(), weights.view(-1, *(1,) * (parameter.dim() - 1)))


def _first_state(group: FusedGroup, parameter: Tensor, name: str) -> Tensor:
    if name == EMA:
        return parameter.detach().clone()
    return group.kind.first_state(group.vectors, parameter, name)


def _advance(group: FusedGroup, clocks: Iterable[StepClock], moving: Tensor | None) -> None:
    for clock in distinct(clocks):
        clock.advance(moving, group.vectors)


def _kept(
    updated: Updated, absent: Sequence[tuple[int, ...]], clocks: Sequence[StepClock]
) -> list[tuple[Tensor, tuple[int, ...], Tensor]]:
    """Copies of what must not change: parameters, states and clocks of trials without a gradient."""
    if not any(absent):
        return []
    tensors: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
    for (parameter, state), trials, clock in zip(updated, absent, clocks):
        if trials:
            for tensor in (parameter, *state.values(), *clock.rows):
                tensors[id(tensor)] = tensor, trials
    return [(tensor, trials, tensor[list(trials)].clone()) for tensor, trials in tensors.values()]


def _has_kernel(group: FusedGroup, parameters: Sequence[Tensor]) -> bool:
    # On the CPU torch's kernels do not change bfloat16 parameters (seen with 2.13); on a GPU they take
    # learning rates in float32, which is too coarse for float64.
    kinds = {p.dtype for p in parameters}
    whole = torch.float64 not in kinds if group.device.type == "cuda" else kinds.issubset(_WHOLE)
    whole = whole and not any(kind.is_complex for kind in kinds)
    return group.kind.kernel is not None and whole and not any(group.numbers.get("dampening", ()))


def _in_one_pass(group: FusedGroup, parameters: Iterable[Tensor]) -> bool:
    """Whether one of our kernels can update all trials of a parameter at once."""
    known = group.kind.one_pass is not None and not group.get("amsgrad", False)
    return known and all(p.dtype == torch.float32 and can_run_on(p) for p in parameters)


def _step_by_vectors(
    group: FusedGroup,
    updated: Updated,
    gradients: list[Tensor],
    clocks: list[StepClock],
    moving: Tensor | None,
) -> None:
    """Step all trials at once, with coefficients broadcast over each parameter, or by one of our kernels."""
    precision = torch.float32
    for dtype in {parameter.dtype.to_real() for parameter, _ in updated}:
        precision = torch.promote_types(precision, dtype)
    tables = {id(clock): _coefficients(group, clock, moving, precision) for clock in distinct(clocks)}
    if (one_pass := group.kind.one_pass) and _in_one_pass(group, [parameter for parameter, _ in updated]):
        for (parameter, state), gradient, clock in zip(updated, gradients, clocks):
            one_pass(parameter, _of_active(gradient, moving), state, tables[id(clock)], group.switches)
        return
    alike: dict[Any, list[Tensors]] = {}
    for (parameter, state), gradient, clock in zip(updated, gradients, clocks):
        states = {name: value for name, value in state.items() if name != EMA}
        key: Any = (parameter.shape, parameter.dtype, id(clock))
        if parameter.numel() > _SMALL[parameter.is_cuda]:
            key = (*key, id(parameter))
        if parameter.is_complex():  # as in torch: real and imaginary parts separately
            parameter, gradient = torch.view_as_real(parameter), torch.view_as_real(gradient)
            states = {name: torch.view_as_real(value) for name, value in states.items()}
        alike.setdefault(key, []).append((parameter, gradient, states))
    for (_, _, clock_id, *_), members in alike.items():
        _update_alike(group, members, tables[clock_id], moving)


def _update_alike(
    group: FusedGroup, members: Sequence[Tensors], table: Tensor, moving: Tensor | None
) -> None:
    """Update parameters of one shape as one with more trials: on small ones, launches take all the time."""
    parameter, gradient, state = members[0]
    if (count := len(members)) > 1:
        parameter, gradient = torch.cat([p for p, _, _ in members]), torch.cat([g for _, g, _ in members])
        state = {name: torch.cat([states[name] for _, _, states in members]) for name in state}
        table, moving = table.repeat(1, count), None if moving is None else moving.repeat(count)
    rows = table.view(*table.shape, *(1,) * (parameter.dim() - 1)).unbind()
    coefficients = dict(zip(group.kind.coefficient_names, rows, strict=True))
    group.kind.update(parameter, _of_active(gradient, moving), state, coefficients, group.switches)
    if count > 1:
        torch._foreach_copy_([own for own, _, _ in members], parameter.chunk(count))
        for name, value in state.items():
            torch._foreach_copy_([states[name] for _, _, states in members], value.chunk(count))


def _coefficients(
    group: FusedGroup, clock: StepClock, moving: Tensor | None, precision: torch.dtype
) -> Tensor:
    """The coefficients of this step: a row per name of the kind, a column per trial.

    Computed once for all parameters that share a clock, and cast as one tensor, as each launch on these few
    numbers takes as long as one on a small weight.
    """
    kind = group.kind
    values = kind.coefficients(group.vectors, clock)
    table = torch.stack([values[name] for name in kind.coefficient_names]).to(precision)
    if moving is None:
        return table
    # Coefficients that leave a trial unchanged; made without a copy from the host, which a CUDA graph cannot
    # contain.
    kept = torch.zeros_like(table[:, :1])
    for row, name in enumerate(kind.coefficient_names):
        if name in kind.keeping:
            kept[row].fill_(1.0)
    return torch.where(moving, table, kept)


def _of_active(gradient: Tensor, active: Tensor | None) -> Tensor:
    """The gradient, zero (not NaN) for trials that are skipped."""
    if active is None:
        return gradient
    kept: Tensor = torch.where(active.view(-1, *(1,) * (gradient.dim() - 1)), gradient, 0.0)
    return kept
