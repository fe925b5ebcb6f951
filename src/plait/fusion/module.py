"""K models of one shape as one module, whose parameters have the trials axis first."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import plait.fusion.rules  # noqa: F401  (fills the table of rules)
from plait.core.names import did_you_mean
from plait.fusion.check import tensor_attributes
from plait.fusion.copies import copy_hooks, gradient_hooks, independent_copy
from plait.fusion.dispatch.fallback import python_marks
from plait.fusion.dispatch.install import ModuleTensors, Slot, shared_names, slots_of, stack
from plait.fusion.dispatch.padding import Rows
from plait.fusion.dispatch.per_trial import Number, one_each
from plait.fusion.dispatch.random import Calls, Count, Streams, unused_seeds
from plait.fusion.dispatch.refusals import check_eager, refuse_compiled
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.dispatch.torch_patches import running
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import patch_methods, patch_norms, patch_recurrent
from plait.fusion.optim.trial_gradients import clip_gradients, refuse_joint_updates
from plait.fusion.rules.hooks import each_trial
from plait.fusion.saved_state import fit_state
from plait.fusion.shared_input import Shared, enter_trials, leave_trials
from plait.fusion.sharing import describe_sharing
from plait.fusion.speed.whole_layers import patch_layers
from plait.fusion.stacking import is_within, same_memory, stacked, unstacked
from plait.fusion.trials.adapter_forms import ArrayForms, refuse_merging
from plait.fusion.trials.frozen_buffers import FrozenBuffers
from plait.fusion.trials.mode import TrialMode, refuse_within
from plait.fusion.trials.one_by_one import apply_alone
from plait.fusion.trials.separation import Separation
from plait.fusion.trials.unfused import PerTrialModules, must_be_unfused

log = logging.getLogger(__name__)
_HELD = ("_parameters", "_buffers", "_modules")
# So far apart are the seeds of a trial on two workers.
_BETWEEN_WORKERS = 1 << 40


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
        # The number of draws from the trials' streams that earlier stages have made in the same call. None:
        # calls of a step go on after one another.
        self.draws_before: Count | None = None
        self._calls = Calls()
        # Whether to warn of draws from Python's generators; and the number of forwards and of other calls, by
        # which it is chosen when these are read, as that takes a while.
        self.warns_of_draws = True
        # Of those that share each batch, by which they draw unlike numbers.
        self.worker = 0
        self._counts = {True: 0, False: 0}
        self._trials = Trials(len(models))
        self._tensors = self._find_tensors()
        # The submodules that run trial by trial, by name.
        self.per_trial_modules: dict[str, PerTrialModules] = {}
        for path, name, tensors in tensor_attributes(models):
            self.module.get_submodule(path).__dict__[name] = TrialTensor(stack(tensors), self._trials)
        self.freeze([])
        patch_norms(self.module)
        patch_layers(self.module)
        patch_methods(self.module)
        patch_recurrent(self.module)
        refuse_joint_updates(self)
        # Of each parameter, for each trial.
        self.gradient_hooks = [
            [gradient_hooks(parameter) for parameter in every]
            for every in zip(*(model.parameters() for model in models))
        ]
        self._register_hooks()
        needed = {**must_be_unfused(models[0]), **unfused}
        for name in sorted(needed, key=len):
            self.unfuse(name, needed[name], models)

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of each trial's model for its slice of the arguments, trials axis first."""
        return self.call(operator.call, *args, **kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function(model, *args)` for each trial; `function` is written for one model."""
        check_eager()
        if self.first_call is not None:
            self._tensors.refuse_added()
            first, self.first_call = self.first_call, None
            first(self, function, args, kwargs)
        self.refuse_unfrozen()
        with self._tensors.installed():
            outcome = self._map(True, lambda *a, **k: function(self.module, *a, **k), args, kwargs)
        if self.training:
            self.ages.add_(1)
            self._calls.begin_step(follows_forward=True)
            self._restore_frozen()
        return outcome

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function(*args)` for each trial; for a loss, a vector with one value per trial."""
        check_eager()
        return self._map(False, function, args, kwargs)

    def _map(
        self, is_forward: bool, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch._C._len_torch_function_stack():
            refuse_within()
        self._counts[is_forward] = number = self._counts[is_forward] + 1
        marks = python_marks() if number & (number - 1) == 0 and self.warns_of_draws else None
        start = self._calls.begin(self.training, is_forward, self.draws_before)
        streams = self._trials.streams = Streams(self.stream_seeds, self.ages, start, self._trials.streams)
        self._trials.tables = None
        enter = partial(enter_trials, self._trials)
        entered_args = [_each_leaf(enter, value) for value in args]
        entered_kwargs = {name: _each_leaf(enter, value) for name, value in kwargs.items()}
        with self._running() as mode:
            outcome = function(*entered_args, **entered_kwargs)
        outcome = mode.current(outcome)
        self._trials.compute_pending()
        self._calls.end(streams.calls)
        if marks is not None and marks != python_marks():
            self.warns_of_draws = False
            log.warning(
                "%s drew from Python's or NumPy's generator, which gives all trials the same number: draw "
                "with torch, of which each has its own stream%s",
                "the model" if is_forward else "a function given to fused.map",
                ", or name the module in fuse(..., unfused=[...])" if is_forward else "",
            )
        return _each_leaf(partial(leave_trials, self._trials), outcome)

    @contextmanager
    def _running(self) -> Iterator[TrialMode]:
        shared = self._tensors.shared_slots
        mode = TrialMode(self._trials, Separation(shared, self._trials) if shared else None)
        with running(self._again, partial(apply_alone, self._trials)), mode:
            yield mode

    def _again(self) -> Callable[[], AbstractContextManager[None]]:
        """A context factory that restores the current state in backward, for activation checkpointing."""
        trials = self._trials
        # What is read in a checkpoint must be in the same state when that is recomputed.
        trials.compute_pending()
        assert trials.streams is not None
        streams, rows = trials.streams.repeated(), trials.rows

        @contextmanager
        def reopened() -> Iterator[None]:
            before = trials.streams, trials.rows, trials.is_alone
            trials.streams, trials.rows, trials.is_alone = streams.repeated(), rows, False
            try:
                with self._tensors.installed(), self._running():
                    yield
            finally:
                trials.streams, trials.rows, trials.is_alone = before
                self._restore_frozen()

        return reopened

    @property
    def stream_seeds(self) -> Tensor:
        """The seeds of the streams that the trials draw from on this worker."""
        return self.seeds + self.worker * _BETWEEN_WORKERS if self.worker else self.seeds

    def batch_rows(self, *args: Any, **kwargs: Any) -> int:
        """How many samples each trial has in the arguments of a forward."""
        if self.is_padded:
            raise FusionError(
                "fused module: several workers share batches of trials of unlike sizes, whose parts have "
                "unlike weights for each trial; train with equal sizes, or on one worker"
            )
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Shared):
                return len(leaf.tensor) if leaf.tensor.dim() else 1
            if isinstance(leaf, Tensor) and leaf.dim() > 1:
                return leaf.shape[1]
        return 1

    @property
    def draws(self) -> Count:
        """The number of draws from the trials' streams up to the end of the last call."""
        return self._calls.draws

    def begin_step(self) -> None:
        """Begin the draws of a step, when other trials have come."""
        self._calls.begin_step()

    def end_step(self) -> None:
        """Begin the draws of the next step, after an update."""
        calls = self._calls
        if calls.follows_forward or self.draws_before is not None:
            calls.begin_step()
            return
        # As where all is trained in evaluation mode: the next step would draw what this one did.
        self.ages.add_(1)
        self._restore_frozen()
        calls.begin_step()

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

    def split(self) -> list[nn.Module]:
        """The trials as ordinary modules; shared parameters are in the memory of this one."""
        return [self.trial(number) for number in range(self.trials)]

    def trial(self, number: int) -> nn.Module:
        """One trial as an ordinary module; an adapter has its own rank and layers again."""
        return self.forms.in_own_form(number, self.array_trial(number))

    def array_trial(self, number: int) -> nn.Module:
        """One trial as an ordinary module, in the form that all trials have in the array."""
        made = unstacked(self.module, number, self.shared.values(), self.per_trial_modules.values())
        for parameter, hooks in zip(made.parameters(), self.gradient_hooks):
            copy_hooks(hooks[number], parameter)
        return made

    def set_forms(self, forms: ArrayForms) -> None:
        """Set the forms of adapters that were brought to a common one."""
        self.forms = forms
        forms.register_hooks(self.module)
        refuse_merging(self.module)

    def of_trials(self, tensor: Tensor) -> TrialTensor:
        """A trial tensor with the same value for each trial, to be kept in an attribute."""
        return TrialTensor(stack([tensor] * self.trials), self._trials)

    def vector(self, name: str, value: Number) -> Tensor:
        """One number for each trial, from one or one per trial, where the trials are."""
        return torch.tensor(one_each(name, value, self.trials), dtype=torch.float64).to(self.seeds.device)

    def set_count(self, count: int) -> None:
        """Set the number of trials, after all tensors were changed."""
        self._trials.count = count
        self.forget()

    def forget(self) -> None:
        """Drop all caches, after tensors or hyperparameters of the trials have changed."""
        self._tensors.forget()

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
        self.per_trial_modules[name] = PerTrialModules(parts[name], modules, why, self._tensors)
        self.forget()

    def copy_of(self, model: nn.Module, name: str) -> nn.Module:
        """A copy of a submodule of one trial; what all trials share is not copied."""
        memo = {id(s.tensor): same_memory(s.tensor) for s in slots_of(model, self._shared) if s.is_shared}
        return independent_copy(model.get_submodule(name), memo)

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that all trials share, by name: held once, without the trials axis."""
        return self._tensors.shared

    def shared_ids(self) -> set[int]:
        """The ids of the tensors that all trials share."""
        return self._tensors.shared_ids()

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
        self._tensors.unshare(names)

    def refuse_unfrozen(self) -> None:
        """Raise FusionError if a shared parameter is to be trained: its gradient would be that of a sum."""
        for slot in self._tensors.shared_slots:
            if slot.tensor.requires_grad:
                raise FusionError(
                    f"fused module: {slot.key!r} requires a gradient, and all trials share it; call "
                    f"fused.unshare({slot.key!r}) before it is unfrozen, which gives each trial its own, or "
                    f"fuse the models with share='never'"
                )

    def _note_separated(self, slot: Slot) -> None:
        """Take note of a slot that is not shared any more, as it holds a tensor of all trials now."""
        if slot.is_buffer:
            self._frozen.keep(f"module.{slot.key}", slot.tensor)
        else:
            assert slot.was_shared is not None
            self.replaced[slot.was_shared] = slot.tensor

    def _find_tensors(self) -> ModuleTensors:
        return ModuleTensors(self.module, self._shared, self._trials, self._note_separated)

    @property
    def frozen(self) -> list[int]:
        """The trials whose buffers are frozen."""
        return list(self._frozen.numbers)

    def freeze(self, numbers: Sequence[int]) -> None:
        """Freeze the buffers of exactly these trials: forwards do not change them."""
        self._frozen = FrozenBuffers(sorted(numbers), self._own_buffers(), self.seeds.device)

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers with the trials axis."""
        buffers = self.module.named_buffers(prefix="module")
        shared = self.shared_ids()
        return [("ages", self.ages), *((name, b) for name, b in buffers if id(b) not in shared)]

    def _restore_frozen(self) -> None:
        if self._frozen.numbers:
            self._frozen.restore(self._own_buffers())

    def clip_grad_norm_(self, max_norm: Number) -> Tensor:
        """Clip the norm of each trial's gradients to `max_norm` (one, or one per trial); returns the norms.

        Same as torch.nn.utils.clip_grad_norm_ on each trial separately.
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return clip_gradients(gradients, self.vector("max_norm", max_norm))

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
        refuse_compiled()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__["_modules"].get("module")
            if not hasattr(module, name):
                raise
            brackets = "(...)" if callable(getattr(module, name)) else ""
            raise AttributeError(
                f"a fused module has no {name!r}, which its models have: use that of one trial, "
                f"fused.trial(0).{name}{brackets}"
            ) from None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a saved state, also one in which other tensors are shared."""
        fit_state(self._tensors, state_dict, prefix)
        self.forms.check_state(state_dict, f"{prefix}module.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _register_hooks(self) -> None:
        for parameter, hooks in zip(self.module.parameters(), self.gradient_hooks):
            if any(hooks):
                parameter.register_hook(each_trial(hooks))
        self.forms.register_hooks(self.module)

    def apply(self, fn: Callable[[nn.Module], None]) -> FusedModule:
        """Raise FusionError: what sets weights would take the trials axis for one of theirs."""
        raise FusionError(
            "apply: found a fused module, whose tensors have the trials axis first; call it on each model "
            "before these are fused, or fused.module.apply(...) if it sets no weights"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and "gradient_hooks" in self.__dict__:  # it is complete
            own = hasattr(type(self), name) or any(name in self.__dict__[held] for held in _HELD)
            if not own and hasattr(self.module, name):
                raise FusionError(
                    f"a fused module has no {name!r}, which its models have; set that of all trials: "
                    f"fused.module.{name}"
                )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedModule:
        """A copy that draws other numbers, as a copied model does."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.seeds.copy_(torch.tensor(unused_seeds(self.trials)))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without caches keyed by object identity."""
        return {**self.__dict__, "_tensors": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._tensors = self._find_tensors()
        self._register_hooks()
        refuse_joint_updates(self)
        indices = shared_names(self.module)
        for path, modules in self.per_trial_modules.items():
            modules.restore(self._tensors)
            for number, module in enumerate(modules.modules):
                for name, parameter in module.named_parameters(prefix=path):
                    copy_hooks(self.gradient_hooks[indices[name]][number], parameter)


def _each_leaf(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with its leaves changed; most are a tensor, for which pytree takes a while."""
    return change(value) if isinstance(value, Tensor) else pytree.tree_map(change, value)
