"""Replaces a module's parameters and buffers by trial tensors during a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.dispatch.tensor import Trials, TrialTensor, unwrap
from plait.fusion.errors import FusionError

_entering = threading.Lock()


@dataclass(eq=False)
class Slot:
    """One parameter or buffer of a module; `key` is its full name."""

    tensors: dict[str, Any]
    name: str
    is_buffer: bool
    key: str
    # Whether all trials share it, so that it has no trials axis; and what was shared until it was written.
    is_shared: bool
    was_shared: Tensor | None = None

    @property
    def tensor(self) -> Any:
        return self.tensors[self.name]

    def separate(self, own: Tensor) -> None:
        """Hold `own`, which has a tensor for each trial, in the place of a shared one."""
        self.was_shared, self.is_shared = self.tensor, False
        self.tensors[self.name] = own


def slots_of(module: nn.Module, shared: Collection[str] = ()) -> list[Slot]:
    """All slots of `module` and its submodules; a tied weight has several, a buffer may be None."""
    slots = []
    for path, part in _named_parts(module, "", {}):
        kinds = ((part._parameters, False), (part._buffers, True))
        for tensors, is_buffer in kinds:
            for name, tensor in tensors.items():
                key = f"{path}.{name}" if path else name
                if is_buffer or tensor is not None:
                    slots.append(Slot(tensors, name, is_buffer, key, key in shared))
    return slots


def _named_parts(module: nn.Module, path: str, found: dict[int, Any]) -> Collection[tuple[str, nn.Module]]:
    """As `named_modules`, which passes each module through a generator for each level above it."""
    if id(module) not in found:
        found[id(module)] = path, module
        for name, child in module._modules.items():
            if child is not None:
                _named_parts(child, f"{path}.{name}" if path else name, found)
    return found.values()


def separate(
    slots: Iterable[Slot], trials: Trials, chosen: Callable[[Tensor], bool]
) -> list[tuple[Tensor, TrialTensor]]:
    """Give each trial its own copy of shared tensors; returns what was shared, with the trials' copies."""
    copies: dict[int, tuple[Tensor, TrialTensor]] = {}
    for slot in slots:
        tensor = slot.tensor
        if slot.is_shared and tensor is not None and chosen(tensor):
            if id(tensor) not in copies:  # a tied weight has several slots
                copies[id(tensor)] = tensor, TrialTensor(_copy_for(tensor, trials.count), trials)
            slot.separate(copies[id(tensor)][1])
    return list(copies.values())


def _copy_for(tensor: Tensor, trials: int) -> Tensor:
    """A tensor of all trials with the values of a shared one; a parameter if that is one."""
    values = tensor.detach().expand(trials, *tensor.shape).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(values, False) if isinstance(tensor, nn.Parameter) else values


class ModuleTensors:
    """The parameters and buffers of a fused module, which are trial tensors during a call.

    All trials share those named in `shared`, from which a name is removed when each trial gets its own;
    `on_separated` is told then.
    """

    def __init__(
        self, module: nn.Module, shared: set[str], trials: Trials, on_separated: Callable[[Slot], None]
    ) -> None:
        self.module, self.trials, self._shared = module, trials, shared
        self._on_separated = on_separated
        self._recurrent = recurrent_in(module)
        refresh_recurrent(self._recurrent)
        # The thread of the call in which the slots hold trial tensors.
        self._thread: int | None = None
        # The trial tensors around the module's tensors, while those do not change.
        self._wrappers: dict[int, tuple[Tensor, Any, TrialTensor]] = {}
        self._find_slots()

    def _find_slots(self) -> None:
        self._parts = list(self.module.modules())
        self._slots = slots_of(self.module, self._shared)
        self.shared_slots = [slot for slot in self._slots if slot.is_shared and slot.tensor is not None]
        self._known = {(id(part), name) for part in self._parts for name in part._buffers}
        self._held_before = self._held()

    def _held(self) -> list[Any]:
        """The submodules and the number of buffers of each module, which differ once a forward adds some."""
        return [(*part._modules.values(), len(part._buffers)) for part in self._parts]

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that all trials share, by name."""
        return {slot.key: slot.tensor for slot in self.shared_slots if slot.is_shared}

    def shared_ids(self) -> set[int]:
        """The ids of the tensors that all trials share."""
        return {id(slot.tensor) for slot in self.shared_slots if slot.is_shared}

    def forget(self) -> None:
        """Drop the trial tensors, after the module's tensors have changed."""
        self._wrappers.clear()

    def refuse_added(self) -> None:
        """Raise FusionError for layers with weights that the trials did not have when they were fused."""
        known = {(id(slot.tensors), slot.name) for slot in self._slots}
        for slot in slots_of(self.module):
            if not slot.is_buffer and (id(slot.tensors), slot.name) not in known:
                raise FusionError(
                    f"fused module: {slot.key!r} came into it after fusing, and would be one for all trials; "
                    f"change the models before plait.fuse(models)"
                )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the slots hold trial tensors; afterwards they are restored.

        A buffer that the module reassigns meanwhile keeps the new value, as in a single model.
        """
        if not self._enter():
            yield
            return
        try:
            yield from self._install()
        finally:
            self._thread = None

    def _enter(self) -> bool:
        """Whether no call is running; raises FusionError if one is in another thread.

        On a GPU a backward pass within a call runs in another thread.
        """
        thread = threading.get_ident()
        with _entering:
            if self._thread is None:
                self._thread = thread
                return True
        if self._thread != thread and torch._C._current_graph_task_id() < 0:
            raise FusionError(
                "found a call of this fused module in another thread, expected one at a time; call it under "
                "a lock, or give each thread a copy (copy.deepcopy)"
            )
        return False

    def _install(self) -> Iterator[None]:
        slots = self._slots
        try:
            before = [slot.tensors[slot.name] for slot in slots]
        except KeyError:
            gone = next(slot.key for slot in slots if slot.name not in slot.tensors)
            raise FusionError(
                f"fused module: {gone!r} was taken away after fusing (by pruning, or a parametrization?); "
                f"change the models before plait.fuse(models)"
            ) from None
        versions = self._versions()
        wrappers = [
            tensor if tensor is None or slot.is_shared else self._wrap(tensor)
            for slot, tensor in zip(slots, before)
        ]
        for slot, wrapper in zip(slots, wrappers):
            slot.tensors[slot.name] = wrapper
        refresh_recurrent(self._recurrent)
        try:
            yield
        finally:
            for slot, tensor, wrapper in zip(slots, before, wrappers):
                now = slot.tensors[slot.name]
                is_kept = now is wrapper or now is None
                slot.tensors[slot.name] = (
                    tensor if is_kept else _after_forward(slot, now, tensor, self.trials)
                )
            refresh_recurrent(self._recurrent)
            self._drop_separated()
        self._refuse_written(versions)
        if self._held() != self._held_before:
            self.refuse_added()
            self._adopt_buffers()

    def _wrap(self, tensor: Tensor) -> TrialTensor:
        signature = (tensor.dtype, tensor.device, tensor.shape)
        kept = self._wrappers.get(id(tensor))
        if kept is not None and kept[0] is tensor and kept[1] == signature:
            return kept[2]
        wrapper = TrialTensor(tensor, self.trials)
        self._wrappers[id(tensor)] = (tensor, signature, wrapper)
        return wrapper

    def _versions(self) -> dict[str, int]:
        """How often each shared tensor was written; those of inference mode do not count it."""
        try:
            return {slot.key: slot.tensors[slot.name]._version for slot in self.shared_slots}
        except RuntimeError:
            return {}

    def _refuse_written(self, before: Mapping[str, int]) -> None:
        """Raise FusionError if a forward wrote to a shared tensor, unseen, so that trials are mixed up."""
        for key, version in self._versions().items():
            if before.get(key, version) != version:
                raise FusionError(
                    f"fused module: the forward has written to {key!r}, which all trials share, through "
                    f"another tensor or out=...; call fused.unshare({key!r}) before, which gives each trial "
                    f"its own, or fuse the models with share='never'"
                )

    def _adopt_buffers(self) -> None:
        """Keep buffers that a forward has registered, with the trials axis."""
        for part in self.module.modules():
            for name, buffer in part._buffers.items():
                if isinstance(buffer, TrialTensor):
                    part._buffers[name] = buffer.stacked.detach()
                elif buffer is not None and (id(part), name) not in self._known:
                    part._buffers[name] = stack([buffer] * self.trials.count)
        self._find_slots()

    def unshare(self, names: Iterable[str]) -> None:
        """Give each trial its own copy of the shared tensors of these names, and of weights tied to them."""
        ids = {id(slot.tensor) for slot in self.shared_slots if slot.key in names}
        separate(self.shared_slots, self.trials, lambda tensor: id(tensor) in ids)
        if self._thread is None:  # else when the forward ends
            self._drop_separated()
        refresh_recurrent(self._recurrent)

    def _drop_separated(self) -> None:
        for slot in [slot for slot in self.shared_slots if slot.was_shared is not None]:
            self.shared_slots.remove(slot)
            self._shared.discard(slot.key)
            if isinstance(slot.tensor, TrialTensor):  # not in a forward, which unwraps them
                slot.tensors[slot.name] = slot.tensor.stacked
            self._on_separated(slot)
            slot.was_shared = None


def _after_forward(slot: Slot, now: Any, before: Any, trials: Trials) -> Any:
    """What a slot holds after a forward that has found `before` in it, and left `now`."""
    if slot.is_shared:  # assigned
        if not isinstance(now, TrialTensor):
            return now
        slot.separate(now)
    elif slot.was_shared is not None and isinstance(now, TrialTensor) and not slot.is_buffer:
        return now.stacked
    if not slot.is_buffer:
        return before
    # A tensor that trials share is copied, so that each can write its own.
    return now.stacked if isinstance(now, TrialTensor) else unwrap(now, trials).clone()


def recurrent_in(module: nn.Module) -> list[nn.RNNBase]:
    return [part for part in module.modules() if isinstance(part, nn.RNNBase)]


def refresh_recurrent(parts: list[nn.RNNBase]) -> None:
    """Update the list of weights that recurrent modules keep; on a GPU they flatten changed weights."""
    for part in parts:
        weights = [getattr(part, name, None) for name in part._flat_weights_names]
        part._flat_weights = weights
        part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def shared_names(module: nn.Module) -> dict[str, int]:
    """Each parameter's name, and a number that tied names have in common."""
    named = module.named_parameters(remove_duplicate=False)
    ids: dict[int, int] = {}
    return {name: ids.setdefault(id(parameter), len(ids)) for name, parameter in named}


def stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors])
