"""Submodules that run trial by trial inside a fused model: ordinary modules, one per trial.

Each has its own Python state, hooks and attributes, and runs the user's code on plain tensors. Its parameters
and buffers are views of the fused ones, so that optimizers, checkpoints and changes of the trials see one
tensor for all trials.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.copies import independent_copy
from plait.fusion.describe import describe
from plait.fusion.dispatch.install import ModuleTensors, Slot, slots_of
from plait.fusion.dispatch.one_trial import one_trial, stack_outcomes
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import TrialTensor, as_outside_of_inference
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.fusion.rules.hooks import foreign_hooks
from plait.fusion.sharing import equal_values
from plait.fusion.trials.late_attributes import HOOKS, LateAttributes
from plait.fusion.trials.memory_of_trials import is_memory_of, is_parameter, is_same_memory, of_all
from plait.fusion.trials.one_by_one import one_by_one
from plait.fusion.trials.partial_gradients import DeliverGradient, delivers, note_others
from plait.fusion.trials.shared_writes import SharedArguments, placed, sums_of
from plait.fusion.trials.single_trial import SingleTrialMode, seeded_for


class PerTrialModules:
    """The per-trial modules of one submodule `part` of a fused model.

    This object takes ownership of `modules`. Gradients of parameters that other submodules also hold flow
    through slices, those of the others through per-trial parameters. Of tensors that all trials share, the
    modules hold the same memory.
    """

    def __init__(
        self, part: nn.Module, modules: Sequence[nn.Module], why: str, tensors: ModuleTensors
    ) -> None:
        self.part = part
        self.modules = list(modules)
        self.why = why
        self._connect(tensors)
        # The modes in which the module was seen not to write to shared tensors.
        self._checked: set[bool] = set()
        # By mode, whether the module writes to shared arguments, so that each trial needs a copy.
        self._copies: dict[bool, bool] = {}
        # A trial's streams of the last forward.
        self._streams: Streams | None = None
        for name in HOOKS:  # the per-trial modules have them
            setattr(part, name, OrderedDict())
        for path, inner in part.named_modules():
            if type(inner).get_extra_state is not nn.Module.get_extra_state:
                vars(inner)["get_extra_state"] = Patch(self._extra_states, path)
                vars(inner)["set_extra_state"] = Patch(self._set_extra_states, path)
        self._late = LateAttributes(part)
        part.forward = Patch(self._run, part)
        self.point()

    def _whole(self) -> dict[str, Tensor]:
        """The parameters and buffers of all trials, by their names in `part`."""
        return {slot.key: of_all(slot.tensor) for slot in slots_of(self.part) if slot.tensor is not None}

    def point(self) -> None:
        """Make the parameters and buffers of the trials views of the current fused ones.

        Gradients of the trials' parameters are added to the fused ones.
        """
        whole, shared = self._whole(), self._tensors.shared_ids()
        if hooked := next((key for key, stacked in whole.items() if foreign_hooks(stacked)), None):
            raise FusionError(
                f"a hook on the gradient of {hooked!r} would not be called, since "
                f"{type(self.part).__qualname__} runs trial by trial ({self.why})",
                "register it on each model before these are fused",
            )
        for number, module in enumerate(self.modules):
            kept: dict[int, Tensor] = {}
            for slot in slots_of(module):
                stacked = whole.get(slot.key)
                if stacked is None or self._is_pointed(
                    slot, stacked, None if id(stacked) in shared else number
                ):
                    continue
                if id(stacked) not in kept:
                    # Through `data`, each trial has its own version counter.
                    kept[id(stacked)] = stacked.data if id(stacked) in shared else stacked.data[number]
                self._point_at(slot, stacked, kept[id(stacked)], number)

    def _is_pointed(self, slot: Slot, stacked: Any, number: int | None) -> bool:
        """Whether a slot holds what `_point_at` would have it hold; buffers are set each time."""
        parameter = slot.tensor
        return (
            not slot.is_buffer
            and parameter.requires_grad == stacked.requires_grad
            and is_memory_of(parameter, stacked, number)
            and (not parameter.requires_grad or delivers(parameter, stacked))
        )

    def _point_at(self, slot: Slot, stacked: Any, own: Tensor, number: int) -> None:
        parameter = slot.tensor
        if slot.is_buffer:
            slot.tensors[slot.name] = own
        elif parameter.is_leaf:
            if parameter.requires_grad != stacked.requires_grad:
                parameter.requires_grad_(stacked.requires_grad)
            if not is_same_memory(parameter, own):
                parameter.data = own
            if not parameter.requires_grad or id(stacked) in self._tied or delivers(parameter, stacked):
                return
            _stop_delivery(parameter)
            deliver = DeliverGradient(stacked, number)
            parameter.__dict__["deliver"] = parameter.register_post_accumulate_grad_hook(deliver)
            note_others(stacked)

    def _connect(self, tensors: ModuleTensors) -> None:
        self._tensors, self.trials = tensors, tensors.trials
        self._tied = _tied_in(self.part, tensors.module)

    def __getstate__(self) -> dict[str, Any]:
        self._late.pass_on(self.modules)
        return {**self.__dict__, "_tensors": None, "_streams": None, "_late": None}

    def restore(self, tensors: ModuleTensors) -> None:
        """Connect to the fused parameters again, after copying or unpickling."""
        self._connect(tensors)
        self._late = LateAttributes(self.part)
        self._replace_all(self.modules)

    def reorder(self, numbers: Sequence[int]) -> None:
        """Select the trials `numbers`, in this order; one that occurs twice is copied."""
        chosen = [self.modules[number] for number in numbers]
        again = [number in numbers[:place] for place, number in enumerate(numbers)]
        self._replace_all([independent_copy(m) if copied else m for m, copied in zip(chosen, again)])

    def replace(self, number: int, module: nn.Module) -> None:
        """Replace the module of one trial."""
        self._replace_all([module if index == number else other for index, other in enumerate(self.modules)])

    def _replace_all(self, modules: list[nn.Module]) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                _stop_delivery(parameter)
        self.modules = modules
        self.point()

    def copy_of(self, number: int, memo: dict[int, Any]) -> nn.Module:
        """A copy of one trial's module, independent of the fused model; `memo` has copies of its tensors."""
        module = self.modules[number]
        self._late.pass_on(self.modules)
        self.point()
        whole = self._whole()
        for slot in slots_of(module):
            if slot.tensor is not None and id(whole.get(slot.key)) in memo:
                memo[id(slot.tensor)] = memo[id(whole[slot.key])]
        return independent_copy(module, memo)

    def _extra_states(self, path: str) -> list[Any]:
        return [module.get_submodule(path).get_extra_state() for module in self.modules]

    def _set_extra_states(self, path: str, states: list[Any]) -> None:
        for module, state in zip(self.modules, states, strict=True):
            module.get_submodule(path).set_extra_state(copy.deepcopy(state))

    def _run(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Each of thousands of looks at a tensor would pass the function mode of the forward.
        self._late.pass_on(self.modules)
        with torch._C.DisableTorchFunction():
            self.point()
            shared = self._shared()
            sums = sums_of(list(shared.values()))
        slices = self._slices_of_tied()
        with one_by_one(self.trials, self._streams) as singles:
            outcomes = self._outcomes(singles, slices, args, kwargs)
        self._streams = singles[-1]
        with torch._C.DisableTorchFunction():
            self._keep_written(shared, sums)
        return stack_outcomes(outcomes, self.trials, type(self.part).__qualname__, self.trials.rows)

    def _outcomes(
        self, singles: list[Streams], slices: dict[int, tuple[Tensor, ...]], args: Any, kwargs: Any
    ) -> list[Any]:
        who, mode = type(self.part).__qualname__, self.part.training
        rows, count = self.trials.rows, self.trials.count
        given = [one_trial((args, kwargs), number, rows, cuts_shared=True) for number in range(count)]
        plain = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Tensor]
        shared = SharedArguments(plain, self._copies.get(mode))
        is_first = mode not in self._checked and bool(self._shared())
        written: dict[str, dict[int, Tensor]] = {}
        outcomes = []
        for number, (module, streams) in enumerate(zip(self.modules, singles)):
            trial_args, trial_kwargs = placed(given[number], shared.of_trial(number, count))
            _follow_modes(self.part, module)
            shape = _shape_of_objects(who, trial_args, trial_kwargs) if shared.copies is None else None
            watched = self._on_copies(number, written) if is_first else nullcontext()
            held = _holding(slices, module, self.part, number)
            with watched, held, seeded_for(streams), SingleTrialMode(streams):
                outcomes.append(module(*trial_args, **trial_kwargs))
            # Such as a cache.
            if shape is not None and shape != _shape_of_objects(who, trial_args, trial_kwargs):
                raise FusionError(
                    f"{who} changes an argument object that all trials share; run the module that calls it "
                    f"trial by trial"
                )
            if number == 0:
                shared.first_has_run()
        shared.refuse_unlike(who, count)
        self._copies[mode] = bool(shared.copies)
        if is_first:
            self._unshare(written)
            self._checked.add(mode)
        return outcomes

    def _shared(self) -> dict[str, Tensor]:
        """The shared tensors in this part, by their names in the fused module."""
        inner = {id(tensor) for tensor in self._whole().values()}
        return {name: tensor for name, tensor in self._tensors.shared.items() if id(tensor) in inner}

    @contextmanager
    def _on_copies(self, number: int, written: dict[str, dict[int, Tensor]]) -> Iterator[None]:
        """Context in which a trial has copies of the shared tensors; what it writes to some is `written`."""
        shared, whole = self._shared(), self._whole()
        with as_outside_of_inference():
            copies = {id(tensor): tensor.detach().clone() for tensor in shared.values()}
        copied = [slot for slot in slots_of(self.modules[number]) if id(whole.get(slot.key)) in copies]
        for slot in copied:
            self._point_at(slot, whole[slot.key], copies[id(whole[slot.key])], number)
        try:
            yield
            for name, tensor in shared.items():
                if not equal_values(copies[id(tensor)], tensor):
                    written.setdefault(name, {})[number] = copies[id(tensor)]
        finally:
            for slot in copied:
                own = whole[slot.key]
                # What the trial has replaced is looked at later.
                if slot.tensor is not None and is_same_memory(slot.tensor, copies[id(own)]):
                    self._point_at(slot, own, own.data, number)

    def _unshare(self, written: dict[str, dict[int, Tensor]]) -> None:
        """Give each trial its own of the shared tensors to which some have written."""
        if not written:
            return
        before = self._whole()
        slots = [(n, slot) for n, module in enumerate(self.modules) for slot in slots_of(module)]
        held = [
            (number, slot)
            for number, slot in slots
            if slot.tensor is not None
            and slot.key in before
            and is_same_memory(slot.tensor, before[slot.key])
        ]
        with as_outside_of_inference():
            self._tensors.unshare([name for name in written if name in self._tensors.shared])
        for name, values in written.items():
            own = of_all(next(slot.tensor for slot in slots_of(self._tensors.module) if slot.key == name))
            for number, value in values.items():
                own.data[number].copy_(value)
        now = self._whole()
        for number, slot in held:
            if now[slot.key] is not before[slot.key]:
                self._point_at(slot, now[slot.key], now[slot.key].data[number], number)

    def _unshare_replaced(self, every: Sequence[Sequence[Slot]]) -> None:
        """Give each trial its own of the shared parameters whose data a trial has replaced."""
        if not (names := {id(tensor): name for name, tensor in self._shared().items()}):
            return
        whole = self._whole()
        for slot in filter(is_parameter, chain(*every)):
            shared = whole.get(slot.key)
            if shared is not None and id(shared) in names and not is_same_memory(slot.tensor, shared):
                self._tensors.unshare([names.pop(id(shared))])

    def _refuse_written(self, every: Sequence[Sequence[Slot]]) -> None:
        """Raise FusionError if a trial has written to a buffer that all share, since it was checked."""
        whole, shared = self._whole(), self._tensors.shared_ids()
        for slot in chain(*every):
            buffer: Any = slot.tensor if slot.is_buffer else None
            # It was made when the trials' modules were pointed at the fused tensors.
            is_shared = buffer is not None and id(whole.get(slot.key)) in shared
            if is_shared and not buffer.is_inference() and buffer._version:
                raise FusionError(
                    f"{type(self.part).__qualname__} writes to its buffer {slot.key!r}, which all trials "
                    f"share; call fused.unshare before, or fuse the models with share='never'"
                )

    def _follow_freezing(self, every: Sequence[Sequence[Slot]], whole: dict[str, Tensor]) -> None:
        """Freeze or unfreeze the fused parameters as all trials' modules have."""
        changed: dict[str, list[bool]] = {}
        for slot in filter(is_parameter, chain(*every)):
            stacked = whole.get(slot.key)
            if stacked is not None and slot.tensor.requires_grad != stacked.requires_grad:
                changed.setdefault(slot.key, []).append(slot.tensor.requires_grad)
        for key, found in changed.items():
            if len(found) < len(every):
                raise FusionError(
                    f"{type(self.part).__qualname__} freezes or unfreezes {key!r} in some trials only"
                )
            whole[key].requires_grad_(found[0])
        for number, slots in enumerate(every) if changed else ():
            for slot in (slot for slot in slots if slot.key in changed):
                shared = id(whole[slot.key]) in self._tensors.shared_ids()
                own = whole[slot.key].data
                self._point_at(slot, whole[slot.key], own if shared else own[number], number)

    def _slices_of_tied(self) -> dict[int, tuple[Tensor, ...]]:
        whole, shared = self._whole().values(), self._tensors.shared_ids()
        return {id(t): t.unbind() for t in whole if id(t) in self._tied and id(t) not in shared}

    @torch.no_grad()
    def _keep_written(self, shared_before: dict[str, Tensor], sums: list[int] | None) -> None:
        """Copy replaced parameter data and buffers back to the fused tensors.

        The `sums` of the bits of what was shared before are those that they should still have.
        """
        every = [slots_of(module) for module in self.modules]
        self._refuse_written(every)
        after = sums_of(list(shared_before.values()))
        pairs = zip(shared_before, sums or (), after or ())
        if written := [name for name, one, other in pairs if one != other]:
            raise FusionError(
                f"{type(self.part).__qualname__} writes to {written[0]!r}, which all trials share, by its "
                f".data or another name; fuse the models with share='never'"
            )
        self._unshare_replaced(every)
        whole, shared = self._whole(), self._tensors.shared_ids()
        self._follow_freezing(every, whole)
        _keep_parameters(every, {key: t for key, t in whole.items() if id(t) not in shared})
        self._keep_buffers(every, shared)

    def _keep_buffers(self, every: Sequence[Sequence[Slot]], shared: set[int]) -> None:
        """Stack the trials' buffers, where some are not the memory of the fused ones any more."""
        buffers = [{slot.key: slot.tensor for slot in slots if slot.is_buffer} for slots in every]
        for slot in slots_of(self.part):
            values = [tensors[slot.key] for tensors in buffers if tensors.get(slot.key) is not None]
            if not slot.is_buffer or slot.tensor is None or len(values) < len(every):
                continue
            inner = of_all(slot.tensor)
            parts = [inner] * len(values) if id(inner) in shared else inner
            if all(is_same_memory(value, part) for value, part in zip(values, parts)):
                continue
            if len({tuple(value.shape) for value in values}) > 1:
                raise FusionError(
                    f"buffer {slot.key}: has different shapes in different trials, expected one"
                )
            with torch.enable_grad():
                slot.tensors[slot.name] = TrialTensor(torch.stack(values), self.trials)


def _keep_parameters(every: Sequence[Sequence[Slot]], whole: dict[str, Tensor]) -> None:
    """Copy the data that trials have given their parameters to those of all trials, by name."""
    for number, slots in enumerate(every):
        for slot in slots:
            stacked = whole.get(slot.key)
            if stacked is None or not is_parameter(slot) or is_memory_of(slot.tensor, stacked, number):
                continue
            stacked.data[number].copy_(slot.tensor.data)
            slot.tensor.data = stacked.data[number]


def _stop_delivery(parameter: Tensor) -> None:
    if (handle := parameter.__dict__.pop("deliver", None)) is not None:
        handle.remove()


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
    stacked = {slot.key: id(of_all(slot.tensor)) for slot in slots_of(part)} if slices else {}
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
            if not is_same_memory(slice_, parameter):  # its data was replaced
                parameter.data.copy_(slice_.data)
            slot.tensors[slot.name] = parameter


def _follow_modes(part: nn.Module, module: nn.Module) -> None:
    """Set the training mode of a trial's module and its submodules to that of the fused ones."""
    if module.training != part.training:
        module.training = part.training
    owns = dict(module._modules.items())  # of a scripted module it is no dict
    for name, child in part._modules.items():
        own = owns.get(name)
        if child is not None and own is not None:
            _follow_modes(child, own)


def _shape_of_objects(who: str, args: Any, kwargs: Any) -> Any:
    """A comparable description of the arguments without tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module))]
    try:
        return spec, describe(objects)
    except FusionError as failure:
        raise FusionError(
            f"{who} takes an object or a function that holds tensors of all trials, which cannot be cut for "
            f"one; run the module that calls it trial by trial"
        ) from failure
