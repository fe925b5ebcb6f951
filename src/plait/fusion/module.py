"""K models of one shape as one module, whose parameters have the trials axis first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import plait.fusion.rules  # noqa: F401  (fills the table of rules)
from plait.core.names import did_you_mean
from plait.fusion.check import tensor_attributes
from plait.fusion.closures import copied_closures
from plait.fusion.copies import copy_hooks, gradient_hooks, held_values, independent_copy
from plait.fusion.dispatch.install import (
    Slot,
    Wrappers,
    installed,
    recurrent_in,
    refresh_recurrent,
    shared_names,
    slots_of,
    stack,
)
from plait.fusion.dispatch.mode import TrialMode
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.separation import Separation, copy_for
from plait.fusion.dispatch.tensor import OF_TRIAL, Trials, TrialTensor, unwrap
from plait.fusion.dispatch.torch_patches import running
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch, patch_generate, patch_norms
from plait.fusion.optim.trial_gradients import clip_gradients, refuse_joint_updates
from plait.fusion.rules.hooks import each_trial
from plait.fusion.shared_input import Shared
from plait.fusion.sharing import describe_sharing
from plait.fusion.speed.whole_layers import patch_layers
from plait.fusion.stacking import same_memory, stacked
from plait.fusion.trials.adapter_forms import ArrayForms, refuse_merging
from plait.fusion.trials.padding import Rows
from plait.fusion.trials.per_trial import Number, PerTrial, one_each
from plait.fusion.trials.unfused import PerTrialModules, apply_alone


class FusedModule(nn.Module):
    """K trials of one model. Inputs and outputs have the trials axis first.

    `module` has the structure and parameter names of one trial; each parameter has shape (trials, ...), but
    for those that all trials share (`shared`), which have the shape of one trial.

    Examples:
        ```python
        fused = plait.fuse([nn.Linear(8, 1) for _ in range(3)])
        fused(torch.randn(3, 4, 8)).shape  # (3, 4, 1)
        fused.trial(0)  # an ordinary nn.Linear
        ```
    """

    seeds: Tensor
    ages: Tensor

    def __init__(
        self,
        models: list[nn.Module],
        seeds: list[int],
        rng_steps: list[int],
        unfused: Mapping[str, str],
        shared: Iterable[str] = (),
    ) -> None:
        super().__init__()
        # The names of the tensors that are held once for all trials, without the trials axis.
        self._shared = set(shared)
        # Frozen parameters that differ between the trials, while others are shared.
        self.unlike_base: Sequence[str] = ()
        # Parameters that were shared, each with the one in its place since.
        self.replaced: dict[Tensor, Tensor] = {}
        self.module = stacked(models, self._shared)
        device = next((tensor.device for tensor in models[0].parameters()), torch.device("cpu"))
        self.register_buffer("seeds", torch.tensor(seeds, dtype=torch.int64, device=device))
        # The trials' rng_steps, under the name that saved states have.
        self.register_buffer("ages", torch.tensor(rng_steps, dtype=torch.int64, device=device))
        # Compares the trials with the single models, which are kept until then, before the first call.
        self.first_call: Callable[[FusedModule, Callable[..., Any], Any, Any], None] | None = None
        self.plain_models: list[nn.Module] = []
        self.forms = ArrayForms()
        # The number of draws from the trials' streams that earlier stages have made in the same forward.
        self.draws_before: int | tuple[int, ...] = 0
        self._trials = Trials(len(models))
        self._wrappers = Wrappers(self._trials)
        self._is_installed = False
        self._find_slots()
        self._recurrent = recurrent_in(self.module)
        # The submodules that run trial by trial, by name.
        self.per_trial_modules: dict[str, PerTrialModules] = {}
        for path, name, tensors in tensor_attributes(models):
            self.module.get_submodule(path).__dict__[name] = TrialTensor(stack(tensors), self._trials)
        self.freeze([])
        patch_norms(self.module)
        patch_layers(self.module)
        patch_generate(self.module)
        refuse_joint_updates(self)
        # Of each parameter, for each trial.
        self.gradient_hooks = [
            [gradient_hooks(parameter) for parameter in every]
            for every in zip(*(model.parameters() for model in models))
        ]
        self._register_hooks()
        needed = dict(unfused)
        for path, part in models[0].named_modules():
            if part._backward_hooks or part._backward_pre_hooks:  # they must see the gradients of one trial
                needed.setdefault(path, "it has backward hooks")
            elif isinstance(part, torch.jit.ScriptModule):
                needed.setdefault(path, "it is a scripted module")
        for name in sorted(needed, key=len):
            self.unfuse(name, needed[name], models)

    @property
    def draws(self) -> int | tuple[int, ...]:
        """The number of draws from the trials' streams up to the end of the last forward."""
        return 0 if self._trials.streams is None else self._trials.streams.calls

    @property
    def trials(self) -> int:
        """How many trials there are."""
        return self._trials.count

    def describe(self) -> str:
        """What is held once and what each trial adds, in a line, such as `base: 374 MB held once, ...`."""
        shared = list(self.shared.values())
        ids = self.shared_ids()
        others = [t for t in (*self.module.parameters(), *self.module.buffers()) if id(t) not in ids]
        unlike = ", ".join([*self.unlike_base[:3], *["..."] * (len(self.unlike_base) > 3)])
        differs = f"; frozen but not equal in all trials: {unlike}" if unlike else ""
        return describe_sharing(shared, others, self.trials, differs)

    def extra_repr(self) -> str:
        return self.describe()

    def _register_hooks(self) -> None:
        for parameter, hooks in zip(self.module.parameters(), self.gradient_hooks):
            if any(hooks):
                parameter.register_hook(each_trial(hooks))
        self.forms.register_hooks(self.module)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without caches keyed by object identity."""
        caches = ("_wrappers", "_parts", "_slots", "_shared_slots", "_recurrent", "_held_before", "_known")
        return {**self.__dict__, **dict.fromkeys(caches)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._wrappers = Wrappers(self._trials)
        self._recurrent = recurrent_in(self.module)
        refresh_recurrent(self._recurrent)
        self._find_slots()
        self._register_hooks()
        refuse_joint_updates(self)
        indices = shared_names(self.module)
        for path, modules in self.per_trial_modules.items():
            modules.restore(self._tied_in(modules.part))
            for number, module in enumerate(modules.modules):
                for name, parameter in module.named_parameters(prefix=path):
                    copy_hooks(self.gradient_hooks[indices[name]][number], parameter)

    @property
    def unfused(self) -> dict[str, str]:
        """The submodules that run trial by trial ("" is the whole model), with the reasons."""
        return {name: modules.why for name, modules in self.per_trial_modules.items()}

    def unfuse(self, name: str, why: str, models: Sequence[nn.Module] | None = None) -> None:
        """Run a submodule trial by trial from now on, with a separate module for each trial.

        They are copied from `models`, or from the current trials.
        """
        parts = dict(self.module.named_modules())
        if name not in parts:
            raise FusionError(f"fuse: unfused={name!r} names no submodule{did_you_mean(name, parts)}")
        if is_within(name, self.per_trial_modules):
            return
        models = [self.array_trial(n) for n in range(self.trials)] if models is None else models
        for other in [other for other in self.per_trial_modules if is_within(other, [name])]:
            del self.per_trial_modules[other]
        modules = [self.copy_of(model, name) for model in models]
        self.per_trial_modules[name] = PerTrialModules(
            parts[name], modules, self._trials, self._tied_in(parts[name]), why, self
        )
        self.forget()

    def copy_of(self, model: nn.Module, name: str) -> nn.Module:
        """A copy of a submodule of one trial; what all trials share is not copied."""
        memo = {id(s.tensor): same_memory(s.tensor) for s in slots_of(model, self._shared) if s.is_shared}
        return independent_copy(model.get_submodule(name), memo)

    def _tied_in(self, part: nn.Module) -> set[int]:
        """The ids of parameters of a submodule that other submodules also hold."""
        return {id(p) for p in part.parameters()} & {id(p) for p in _parameters_outside(self.module, part)}

    def of_trials(self, tensor: Tensor) -> TrialTensor:
        """A trial tensor with the same value for each trial, to be kept in an attribute."""
        return TrialTensor(stack([tensor] * self.trials), self._trials)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of each trial's model for its slice of the arguments, trials axis first."""
        return self.call(call_forward, *args, **kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function(model, *args)` for each trial; `function` is written for one model."""
        if self.first_call is not None:
            first, self.first_call = self.first_call, None
            first(self, function, args, kwargs)
        if self._shared_slots:
            self.refuse_unfrozen()
        with self._installed():
            outcome = self.map(lambda *a, **k: function(self.module, *a, **k), *args, **kwargs)
        if self.training:
            self.ages.add_(1)
            self._restore_frozen()
        return outcome

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function(*args)` for each trial; for a loss, a vector with one value per trial."""
        self._trials.streams = Streams(self.seeds, self.ages, self.draws_before, self._trials.streams)
        entered_args = [_each_leaf(self._enter, value) for value in args]
        entered_kwargs = {name: _each_leaf(self._enter, value) for name, value in kwargs.items()}
        with running(self._again, self._apply_alone), self._mode():
            outcome = function(*entered_args, **entered_kwargs)
        return _each_leaf(self._leave, outcome)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Context in which the module's parameters and buffers are trial tensors."""
        if self._is_installed:
            yield
            return
        self._is_installed = True
        try:
            versions = _versions(self._shared_slots)
            with installed(self._slots, self._recurrent, self._wrappers, self._trials):
                yield
            if versions:
                self._note_separated()
                _refuse_written(versions, self._shared_slots)
            if self._held() != self._held_before:
                self._adopt_buffers()
        finally:
            if self._shared_slots:
                self._note_separated()
            self._is_installed = False

    def _mode(self) -> TrialMode:
        shared = self._shared_slots
        return TrialMode(self._trials, Separation(shared, self._trials) if shared else None)

    def _adopt_buffers(self) -> None:
        """Keep buffers that a forward has registered, with the trials axis."""
        for part in self.module.modules():
            for name, buffer in part._buffers.items():
                if isinstance(buffer, TrialTensor):
                    part._buffers[name] = buffer.stacked.detach()
                elif buffer is not None and (id(part), name) not in self._known:
                    part._buffers[name] = stack([buffer] * self.trials)
        self._find_slots()

    def _find_slots(self) -> None:
        self._parts = list(self.module.modules())
        self._slots = slots_of(self.module, self._shared)
        self._shared_slots = [slot for slot in self._slots if slot.is_shared and slot.tensor is not None]
        self._known = {(id(part), name) for part in self._parts for name in part._buffers}
        self._held_before = self._held()

    def _held(self) -> list[Any]:
        """The submodules and the number of buffers of each module, which differ once a forward adds some."""
        return [(*part._modules.values(), len(part._buffers)) for part in self._parts]

    def _again(self) -> Callable[[], AbstractContextManager[None]]:
        """A context factory that restores the current state in backward, for activation checkpointing."""
        trials = self._trials
        assert trials.streams is not None
        streams, rows = trials.streams.repeated(), trials.rows

        @contextmanager
        def reopened() -> Iterator[None]:
            before = trials.streams, trials.rows, trials.is_alone
            trials.streams, trials.rows, trials.is_alone = streams.repeated(), rows, False
            try:
                with self._installed(), running(self._again, self._apply_alone), self._mode():
                    yield
            finally:
                trials.streams, trials.rows, trials.is_alone = before
                self._restore_frozen()

        return reopened

    def _apply_alone(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return apply_alone(self._trials, function, args, kwargs)

    @property
    def is_padded(self) -> bool:
        """Whether the current batch has padding rows."""
        return self._trials.rows is not None

    @contextmanager
    def padded(self, counts: Sequence[int]) -> Iterator[None]:
        """Context in which each trial's batch has `counts` real rows, followed by padding.

        Batch norms and the losses of torch.nn ignore padding. The batch must be the first axis of the inputs.
        Other code that mixes rows of a batch sees padding too.
        """
        if len(counts) != self.trials:
            raise FusionError(
                f"padded: found {len(counts)} counts of rows for {self.trials} trials, expected one each"
            )
        self._trials.rows = Rows(counts, max(counts))
        try:
            yield
        finally:
            self._trials.rows = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a saved state, also one in which other tensors are shared."""
        self._check_state(state_dict, prefix)
        self.forms.check_state(state_dict, f"{prefix}module.")
        names = {id(tensor): name for name, tensor in self.shared.items()}
        tensors = {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }
        for name, tensor in tensors.items():
            key = f"{prefix}module.{name}"
            if (saved := state_dict.get(key)) is None:
                continue
            shared = names.pop(id(tensor), None)
            if shared is not None and saved.shape == tensor.shape:
                tensor.data = tensor.data.clone()  # the memory may be that of the models
            elif shared is not None and saved.shape == (self.trials, *tensor.shape):
                self.unshare(shared)
            elif tensor.shape == (self.trials, *saved.shape):
                state_dict[key] = saved.expand(tensor.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_state(self, state: Mapping[str, Any], prefix: str) -> None:
        """Raise FusionError for the state of another number of trials, or of a single model."""
        seeds = state.get(f"{prefix}seeds")
        if seeds is not None and len(seeds) != self.trials:
            raise FusionError(
                f"load_state_dict: found the state of {len(seeds)} trials, expected {self.trials}; fuse as "
                f"many models first, or bring the array there with keep_trials or add_trials"
            )
        names = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        if seeds is None and names & set(self.module.state_dict()):
            raise FusionError(
                "load_state_dict: found the state of a single model, expected that of a fused module; load "
                "it into a model and fuse that, or put the model into the array with replace_trial"
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not hasattr(type(self.__dict__["_modules"].get("module")), name):
                raise
            raise AttributeError(
                f"a fused module has no {name!r}, which its models have: call that of one trial, "
                f"fused.trial(0).{name}(...)"
            ) from None

    def clip_grad_norm_(self, max_norm: Number) -> Tensor:
        """Clip the norm of each trial's gradients to `max_norm` (one, or one per trial); returns the norms.

        Same as torch.nn.utils.clip_grad_norm_ on each trial separately.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        limits = one_each("max_norm", max_norm, self.trials)
        return clip_gradients(gradients, torch.tensor(limits, dtype=torch.float64).to(self.seeds.device))

    def channels_last(self) -> FusedModule:
        """Store the weights of 2d convolutions in channels-last format, which is fastest on GPUs."""
        shared = self.shared_ids()
        for parameter in self.module.parameters():
            if id(parameter) in shared:
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            elif parameter.dim() == 5:
                parameter.data = parameter.data.movedim(2, -1).contiguous().movedim(-1, 2)
        self.forget()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise FusionError: torch.compile would break the graph at each operation on trial tensors."""
        raise FusionError(
            "fused module: torch.compile cannot trace it in one graph; capture the step as a CUDA graph "
            "(plait.fusion.speed.cuda_graph.CapturedStep), or do not compile"
        )

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that all trials share, by name: held once, without the trials axis."""
        return {slot.key: slot.tensor for slot in self._shared_slots if slot.is_shared}

    def shared_ids(self) -> set[int]:
        """The ids of the tensors that all trials share."""
        return {id(tensor) for tensor in self.shared.values()}

    def unshare(self, name: str = "") -> None:
        """Give each trial its own copy of a shared tensor, or of all those of a submodule; "" names all.

        Only then a frozen parameter can be unfrozen. An optimizer of the module follows.
        """
        names = [key for key in self._shared if is_within(key, [name])]
        if not names:
            raise FusionError(
                f"unshare: found no shared tensor {name!r}{did_you_mean(name, self._shared)}; those there "
                f"are, by name: fused.shared"
            )
        tensors = {id(self.shared[key]) for key in names if key in self.shared}
        copies: dict[int, Tensor] = {}
        for slot in self._shared_slots:  # those of a tied weight, too
            tensor = slot.tensor
            if slot.is_shared and id(tensor) in tensors:
                if id(tensor) not in copies:
                    own = copy_for(tensor, self.trials)
                    copies[id(tensor)] = TrialTensor(own, self._trials) if self._is_installed else own
                slot.separate(copies[id(tensor)])
        if not self._is_installed:  # else when the forward ends
            self._note_separated()
        refresh_recurrent(self._recurrent)

    def _note_separated(self) -> None:
        """Take note of slots that are not shared any more, as they hold a tensor of all trials now."""
        for slot in list(self._shared_slots):
            if slot.was_shared is None:
                continue
            self._shared_slots.remove(slot)
            if slot.is_buffer:
                self._kept[f"module.{slot.key}"] = slot.tensor[self._frozen].clone()
            else:
                self.replaced[slot.was_shared] = slot.tensor
            self._shared.discard(slot.key)
            slot.was_shared = None

    def refuse_unfrozen(self) -> None:
        """Raise FusionError if a shared parameter is to be trained: its gradient would be that of a sum."""
        for slot in self._shared_slots:
            if slot.tensor.requires_grad:
                raise FusionError(
                    f"fused module: {slot.key!r} requires a gradient, and all trials share it; call "
                    f"fused.unshare({slot.key!r}) before it is unfrozen, which gives each trial its own, or "
                    f"fuse the models with share='never'"
                )

    def set_count(self, count: int) -> None:
        """Set the number of trials, after all tensors were changed."""
        self._trials.count = count
        self.forget()

    def forget(self) -> None:
        """Drop all caches, after tensors or hyperparameters of the trials have changed."""
        self._wrappers.forget()

    @property
    def frozen(self) -> list[int]:
        """The trials whose buffers are frozen."""
        return list(self._frozen_numbers)

    def freeze(self, numbers: Sequence[int]) -> None:
        """Freeze the buffers of exactly these trials: forwards do not change them."""
        self._frozen_numbers = sorted(numbers)
        self._frozen = torch.tensor(self._frozen_numbers, dtype=torch.int64, device=self.seeds.device)
        self._kept = {name: b[self._frozen].clone() for name, b in self._own_buffers()}

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers with the trials axis."""
        buffers = self.module.named_buffers(prefix="module")
        shared = self.shared_ids()
        return [("ages", self.ages), *((name, b) for name, b in buffers if id(b) not in shared)]

    def _restore_frozen(self) -> None:
        if self._frozen_numbers:
            for name, buffer in self._own_buffers():
                # Hidden from autograd, which may have saved the buffer; gradients of these trials are not
                # used.
                if name in self._kept:
                    buffer.data.index_copy_(0, self._frozen, self._kept[name])

    def _enter(self, value: Any) -> Any:
        if isinstance(value, Shared):
            return value.tensor
        if not isinstance(value, Tensor) or isinstance(value, TrialTensor):
            return value
        if value.dim() == 0 or value.shape[0] != self.trials:
            raise FusionError(
                f"fused module: found an input of shape {tuple(value.shape)}, expected the trials axis "
                f"first: ({self.trials}, ...); wrap inputs that all trials share as plait.fusion.Shared(x)"
            )
        entered = TrialTensor(value, self._trials)
        entered.rows_at = getattr(value, "plait_rows_at", 0)
        return entered

    def _leave(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        left = unwrap(value, self._trials)
        if isinstance(value, TrialTensor) and value.rows_at and self._trials.rows is not None:
            # A loss that uses this tensor later must know that its rows are not the first axis.
            left.plait_rows_at = value.rows_at  # type: ignore[attr-defined]
        return left

    def set_forms(self, forms: ArrayForms) -> None:
        """Set the forms of adapters that were brought to a common one."""
        self.forms = forms
        forms.register_hooks(self.module)
        refuse_merging(self.module)

    def split(self) -> list[nn.Module]:
        """The trials as ordinary modules; shared parameters are in the memory of this one."""
        return [self.trial(number) for number in range(self.trials)]

    def trial(self, number: int) -> nn.Module:
        """One trial as an ordinary module; an adapter has its own rank and layers again."""
        return self.forms.in_own_form(number, self.array_trial(number))

    def array_trial(self, number: int) -> nn.Module:
        """One trial as an ordinary module, in the form that all trials have in the array."""
        # A buffer is copied, as the trial may write to it.
        memo: dict[Any, Any] = {
            id(t): same_memory(t) if isinstance(t, nn.Parameter) else t.clone() for t in self.shared.values()
        }
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if id(tensor) in memo:
                continue
            value = tensor.detach()[number].clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        # Tensors that a forward stored in an attribute, such as attention weights, have the trials axis too.
        memo[OF_TRIAL] = number
        for value in held_values(self.module):
            if isinstance(value, TrialTensor):
                memo[id(value)] = value.stacked[number].detach().clone()
            elif isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
            elif isinstance(value, PerTrial):
                memo[id(value)] = value.of(number)
        for modules in self.per_trial_modules.values():
            memo[id(modules.part)] = modules.copy_of(number, memo)
        with copied_closures(self.module):
            made = copy.deepcopy(self.module, memo)
        for part in made.modules():
            for name in ("forward", "generate"):
                if isinstance(vars(part).get(name), Patch):
                    delattr(part, name)
        refresh_recurrent(recurrent_in(made))
        for parameter, hooks in zip(made.parameters(), self.gradient_hooks):
            copy_hooks(hooks[number], parameter)
        return made


def _each_leaf(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with its leaves changed; most are a tensor, for which pytree takes a while."""
    return change(value) if isinstance(value, Tensor) else pytree.tree_map(change, value)


def call_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The result of a module's call."""
    return module(*args, **kwargs)


def _versions(slots: Sequence[Slot]) -> dict[str, int]:
    """How often each tensor was written; those of inference mode do not count it."""
    try:
        return {slot.key: slot.tensors[slot.name]._version for slot in slots}
    except RuntimeError:
        return {}


def _refuse_written(before: Mapping[str, int], shared: Sequence[Slot]) -> None:
    """Raise FusionError if a forward has written to a shared tensor, unseen, so that trials are mixed up."""
    for key, version in _versions(shared).items():
        if before.get(key, version) != version:
            raise FusionError(
                f"fused module: the forward has written to {key!r}, which all trials share, through another "
                f"tensor or out=...; call fused.unshare({key!r}) before, which gives each trial its own, or "
                f"fuse the models with share='never'"
            )


def is_within(name: str, others: Iterable[str]) -> bool:
    """Whether a module is one of others, or inside of one; "" is the whole model."""
    return any(name == other or name.startswith(f"{other}.") or not other for other in others)


def _parameters_outside(module: nn.Module, part: nn.Module) -> list[nn.Parameter]:
    """The parameters held by submodules outside of `part`."""
    inside = {id(one) for one in part.modules()}
    return [
        parameter
        for one in module.modules()
        if id(one) not in inside
        for parameter in one._parameters.values()
        if parameter is not None
    ]
