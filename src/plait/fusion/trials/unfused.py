"""Submodules that run trial by trial inside a fused model: ordinary modules, one per trial.

Each has its own Python state, hooks and attributes, and runs the user's code on plain tensors. Its parameters
and buffers are views of the fused ones, so that optimizers, checkpoints and changes of the trials see one
tensor for all trials.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.copies import independent_copy
from plait.fusion.describe import describe
from plait.fusion.dispatch.install import slots_of
from plait.fusion.dispatch.one_trial import stack_outcomes
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.fusion.sharing import equal_values
from plait.fusion.trials.one_by_one import one_by_one, slice_of
from plait.fusion.trials.partial_gradients import DeliverGradient
from plait.fusion.trials.single_trial import SingleTrialMode, seeded_for

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class SharesTensors(Protocol):
    """A fused module, some tensors of which all trials share."""

    module: nn.Module

    @property
    def trials(self) -> int: ...

    @property
    def shared(self) -> dict[str, Tensor]: ...

    def shared_ids(self) -> set[int]: ...

    def unshare(self, name: str) -> None: ...


class PerTrialModules:
    """The per-trial modules of one submodule `part` of a fused model.

    This object takes ownership of `modules`. Gradients of parameters that other submodules also hold flow
    through slices, those of the others through per-trial parameters. Of tensors that all trials of `fused`
    share, the modules of all trials hold the same memory.
    """

    def __init__(
        self,
        part: nn.Module,
        modules: Sequence[nn.Module],
        trials: Trials,
        why: str,
        fused: SharesTensors,
    ) -> None:
        self.part = part
        self.modules = list(modules)
        self.trials = trials
        self.why = why
        self._fused = fused
        self._tied = _tied_in(part, fused.module)
        # The modes in which the module was seen not to write to shared tensors.
        self._checked: set[bool] = set()
        # Whether the module writes to shared input tensors, so that each trial needs a copy; None if unknown.
        self._copies: bool | None = None
        for name in _HOOKS:  # the per-trial modules have them
            setattr(part, name, OrderedDict())
        part.forward = Patch(self._run, part)
        self.point()

    def _whole(self) -> dict[str, Tensor]:
        """The parameters and buffers of all trials, by their names in `part`."""
        return {slot.key: _inner(slot.tensor) for slot in slots_of(self.part) if slot.tensor is not None}

    def _parameters(self) -> list[tuple[int, Any, Any]]:
        """A trial's number, a fused parameter and the trial's own."""
        whole = self._whole()
        return [
            (number, whole[slot.key], slot.tensor)
            for number, module in enumerate(self.modules)
            for slot in slots_of(module)
            if not slot.is_buffer and slot.key in whole and slot.tensor.is_leaf
        ]

    def point(self, only: Container[int] | None = None) -> None:
        """Make the trials' parameters and buffers views of the current fused ones; or `only` of these, by id.

        Gradients of the trials' parameters are added to the fused ones.
        """
        whole, shared = self._whole(), self._fused.shared_ids()
        for number, module in enumerate(self.modules):
            kept: dict[int, Tensor] = {}
            for slot in slots_of(module):
                stacked = whole.get(slot.key)
                if stacked is None or (only is not None and id(stacked) not in only):
                    continue
                # Through `data`, each trial has its own version counter.
                own = stacked.data if id(stacked) in shared else stacked.data[number]
                if slot.is_buffer:
                    slot.tensors[slot.name] = kept.setdefault(id(stacked), own)
                elif slot.tensor.is_leaf:
                    self._point_at(stacked, slot.tensor, own, number)

    def _point_at(self, stacked: Any, parameter: nn.Parameter, slice_: Tensor, number: int) -> None:
        if parameter.requires_grad != stacked.requires_grad:
            parameter.requires_grad_(stacked.requires_grad)
        if not _is_same_memory(parameter, slice_):
            parameter.data = slice_
        if parameter.requires_grad and id(stacked) not in self._tied and "deliver" not in parameter.__dict__:
            deliver = DeliverGradient(stacked, number)
            parameter.__dict__["deliver"] = parameter.register_post_accumulate_grad_hook(deliver)

    def restore(self) -> None:
        """Connect to the fused parameters again, after copying or unpickling."""
        self._tied = _tied_in(self.part, self._fused.module)
        self._replace_all(self.modules)

    def reorder(self, numbers: Sequence[int]) -> None:
        """Select the trials `numbers`, in this order; one that occurs twice is copied."""
        used: set[int] = set()
        modules = []
        for number in numbers:
            module = self.modules[number]
            modules.append(independent_copy(module) if number in used else module)
            used.add(number)
        self._replace_all(modules)

    def replace(self, number: int, module: nn.Module) -> None:
        """Replace the module of one trial."""
        self._replace_all([module if index == number else other for index, other in enumerate(self.modules)])

    def _replace_all(self, modules: list[nn.Module]) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                if (handle := parameter.__dict__.pop("deliver", None)) is not None:
                    handle.remove()
        self.modules = modules
        self.point()

    def copy_of(self, number: int, memo: dict[int, Any]) -> nn.Module:
        """A copy of one trial's module, independent of the fused model; `memo` has copies of its tensors."""
        module = self.modules[number]
        self.point()
        whole = self._whole()
        for slot in slots_of(module):
            if slot.tensor is not None and id(whole.get(slot.key)) in memo:
                memo[id(slot.tensor)] = memo[id(whole[slot.key])]
        return independent_copy(module, memo)

    def _run(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.point()
        slices = self._slices_of_tied()
        with one_by_one(self.trials) as singles:
            outcomes = self._outcomes(singles, slices, args, kwargs)
        self._keep_written()
        return stack_outcomes(outcomes, self.trials, type(self.part).__qualname__, self.trials.rows)

    def _outcomes(
        self, singles: list[Streams], slices: dict[int, tuple[Tensor, ...]], args: Any, kwargs: Any
    ) -> list[Any]:
        given = [slice_of((args, kwargs), number, self.trials.rows) for number in range(self.trials.count)]
        plain = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Tensor]
        pristine = {id(leaf): leaf.clone() for leaf in plain} if self._copies is None else {}
        counted = not any(leaf.is_inference() for leaf in plain)
        versions = [leaf._version for leaf in plain] if counted else []
        outcomes = []
        for number, (module, streams) in enumerate(zip(self.modules, singles)):
            trial_args, trial_kwargs = given[number]
            # The last trial may write to the tensor itself, as a single model would.
            if self._copies and (number if pristine else number < self.trials.count - 1):
                trial_args, trial_kwargs = _with_copies((trial_args, trial_kwargs), plain, pristine)
            _follow_modes(self.part, module)
            shape = _shape_of_objects(trial_args, trial_kwargs) if self._copies is None else None
            watched = self._unshare_written() if number == 0 else nullcontext()
            held = _holding(slices, module, self.part, number)
            with watched, held, seeded_for(streams), SingleTrialMode(streams):
                outcomes.append(module(*trial_args, **trial_kwargs))
            if self._copies is None:
                if shape != _shape_of_objects(trial_args, trial_kwargs):  # such as a cache
                    raise FusionError(
                        f"{type(self.part).__qualname__} changes an argument object that all trials "
                        f"share; run the module that calls it trial by trial"
                    )
                if counted:
                    self._copies = versions != [leaf._version for leaf in plain]
                else:  # inference mode has no version counters
                    self._copies = any(not torch.equal(leaf, pristine[id(leaf)]) for leaf in plain)
        return outcomes

    def _shared(self) -> dict[str, Tensor]:
        """The shared tensors in this part, by their names in the fused module."""
        inner = {id(tensor) for tensor in self._whole().values()}
        return {name: tensor for name, tensor in self._fused.shared.items() if id(tensor) in inner}

    @contextmanager
    def _unshare_written(self) -> Iterator[None]:
        """Context for the first trial: each trial gets its own of the shared tensors that are written in it.

        Values are compared once in each mode of the module.
        """
        if self.part.training in self._checked or not (shared := self._shared()):
            yield
            return
        self._checked.add(self.part.training)
        # Backward may need what is written to a buffer, so the trial writes to a copy from the beginning.
        before = {name: tensor.detach().clone() for name, tensor in shared.items()}
        copies = self._copy_buffers_of_first({id(tensor) for tensor in shared.values()})
        yield
        own_ids = set()
        for name, tensor in shared.items():
            current = copies.get(id(tensor), tensor)
            if not equal_values(current, before[name]):
                first = current.detach().clone()
                tensor.data.copy_(before[name])
                if name in self._fused.shared:  # else it was, under another name
                    self._fused.unshare(name)
                own = _inner(next(slot.tensor for slot in slots_of(self._fused.module) if slot.key == name))
                own.data[0].copy_(first)
                own_ids.add(id(own))
        self.point(only=own_ids)
        # Buffers that were not written; the module may have replaced others.
        held = {id(copies[id(tensor)]): tensor for tensor in shared.values() if id(tensor) in copies}
        for slot in slots_of(self.modules[0]):
            if (unwritten := held.get(id(slot.tensor))) is not None:
                slot.tensors[slot.name] = unwritten.data

    def _copy_buffers_of_first(self, shared: Container[int]) -> dict[int, Tensor]:
        """Give the first trial copies of its shared buffers, by the id of these."""
        whole, copies = self._whole(), dict[int, Tensor]()
        for slot in slots_of(self.modules[0]):
            inner = whole.get(slot.key)
            if slot.is_buffer and inner is not None and id(inner) in shared:
                slot.tensors[slot.name] = copies.setdefault(id(inner), inner.detach().clone())
        return copies

    def _unshare_replaced(self) -> None:
        """Give each trial its own of the shared parameters whose data a trial has replaced."""
        if not (names := {id(tensor): name for name, tensor in self._shared().items()}):
            return
        for _, shared, parameter in self._parameters():
            if id(shared) in names and not _is_same_memory(parameter, shared):
                self._fused.unshare(names.pop(id(shared)))

    def _refuse_written(self) -> None:
        """Raise FusionError if a trial has written to a buffer that all share, since it was checked."""
        whole, shared = self._whole(), self._fused.shared_ids()
        for slot in (slot for module in self.modules for slot in slots_of(module) if slot.is_buffer):
            buffer = slot.tensor
            # It was made when the trials' modules were pointed at the fused tensors.
            is_shared = buffer is not None and id(whole.get(slot.key)) in shared
            if is_shared and not buffer.is_inference() and buffer._version:
                raise FusionError(
                    f"{type(self.part).__qualname__} writes to its buffer {slot.key!r}, which all trials "
                    f"share; call fused.unshare before, or fuse the models with share='never'"
                )

    def _slices_of_tied(self) -> dict[int, tuple[Tensor, ...]]:
        whole, shared = self._whole().values(), self._fused.shared_ids()
        return {id(t): t.unbind() for t in whole if id(t) in self._tied and id(t) not in shared}

    @torch.no_grad()
    def _keep_written(self) -> None:
        """Copy replaced parameter data and buffers back to the fused tensors."""
        self._refuse_written()
        self._unshare_replaced()
        shared = self._fused.shared_ids()
        for number, stacked, parameter in self._parameters():
            if id(stacked) not in shared and not _is_same_memory(parameter, stacked.data[number]):
                stacked.data[number].copy_(parameter.data)
                parameter.data = stacked.data[number]
        every = [{slot.key: slot.tensor for slot in slots_of(module)} for module in self.modules]
        for slot in slots_of(self.part):
            values = [tensors[slot.key] for tensors in every if tensors.get(slot.key) is not None]
            if not slot.is_buffer or slot.tensor is None or len(values) < len(every):
                continue
            inner = _inner(slot.tensor)
            parts = [inner] * len(values) if id(inner) in shared else inner
            if all(_is_same_memory(value, part) for value, part in zip(values, parts)):
                continue
            if len({tuple(value.shape) for value in values}) > 1:
                raise FusionError(
                    f"buffer {slot.key}: has different shapes in different trials, expected one"
                )
            with torch.enable_grad():
                slot.tensors[slot.name] = TrialTensor(torch.stack(values), self.trials)


def _tied_in(part: nn.Module, module: nn.Module) -> set[int]:
    """The ids of the parameters of a submodule that other submodules also hold."""
    inside = {id(one) for one in part.modules()}
    outside = [one for one in module.modules() if id(one) not in inside]
    held = {id(parameter) for one in outside for parameter in one._parameters.values()}
    return {id(parameter) for parameter in part.parameters()} & held


def must_be_unfused(model: nn.Module) -> dict[str, str]:
    """The submodules that must run trial by trial, by name, with the reasons."""
    reasons = {}
    for path, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:  # they must see the gradients of one trial
            reasons[path] = "it has backward hooks"
        elif isinstance(part, torch.jit.ScriptModule):
            reasons[path] = "it is a scripted module"
    return reasons


@contextmanager
def _holding(
    slices: dict[int, tuple[Tensor, ...]], module: nn.Module, part: nn.Module, number: int
) -> Iterator[None]:
    """Context in which one trial's module holds slices of tied parameters of the fused `part`."""
    stacked = {slot.key: id(_inner(slot.tensor)) for slot in slots_of(part)} if slices else {}
    held = [
        (slot, slot.tensor, slices[stacked[slot.key]][number])
        for slot in (slots_of(module) if slices else ())
        if stacked.get(slot.key) in slices
    ]
    for slot, _, slice_ in held:
        slot.tensors[slot.name] = slice_
    try:
        yield
    finally:
        for slot, parameter, slice_ in held:
            if not _is_same_memory(slice_, parameter):  # its data was replaced
                parameter.data.copy_(slice_.data)
            slot.tensors[slot.name] = parameter


def _follow_modes(part: nn.Module, module: nn.Module) -> None:
    """Set the training mode of a trial's module and its submodules to that of the fused ones."""
    parts = dict(part.named_modules())
    for path, submodule in module.named_modules():
        if path in parts and submodule.training != parts[path].training:
            submodule.training = parts[path].training


def _shape_of_objects(args: Any, kwargs: Any) -> Any:
    """A comparable description of the arguments without tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module))]
    return spec, describe(objects)


def _inner(tensor: Any) -> Any:
    return tensor.stacked if isinstance(tensor, TrialTensor) else tensor


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _with_copies(values: Any, plain: list[Tensor], pristine: dict[int, Tensor]) -> Any:
    """The values with shared tensors as they were before the first trial ran."""
    known = {id(leaf) for leaf in plain}

    def pick(value: Any) -> Any:
        if type(value) is Tensor and id(value) in known:
            return pristine.get(id(value), value).clone()
        return value

    return pytree.tree_map(pick, values)
