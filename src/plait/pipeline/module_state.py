"""State that modules keep between forwards: buffers, weights written by forward, Python attributes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from plait.verification.python_state import TORCHS, PythonState

# Buffers of up to this many elements are always copied, whether or not forward ever wrote to them.
COPIED_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class _AttributeSlot:
    """The module and name of a buffer, or of a parameter that forward writes."""

    owner: nn.Module
    name: str
    is_parameter: bool = False

    @property
    def holder(self) -> dict[str, Any]:
        return self.owner._parameters if self.is_parameter else self.owner._buffers


@dataclass(frozen=True)
class ModuleSnapshot:
    """Attributes by module; for each slot its tensor, the tensor's version, and a copy if one was made.

    `deep` is the state that some modules keep in containers, objects and globals.
    """

    attributes: list[tuple[nn.Module, dict[str, Any]]]
    tensors: list[tuple[_AttributeSlot, Tensor, int, Tensor | None]]
    deep: PythonState | None


class ModuleMemory:
    """Captures and restores what a forward may change in `module` and its submodules.

    Batch normalisation does not increase the version of its buffers, so every small buffer is copied. A large
    one is copied only after a write to it was seen, as most are masks and tables. `written` names parameters
    that forward writes, `keeping` the submodules with Python state beyond the values of attributes.
    """

    def __init__(
        self, module: nn.Module, written: Collection[str] = (), keeping: Collection[str] = ()
    ) -> None:
        self._modules = list(module.modules())
        self._slots = [_AttributeSlot(owner, name) for owner in self._modules for name in owner._buffers]
        self._written: set[_AttributeSlot] = set()
        for path in written:
            owner, _, name = path.rpartition(".")
            self._written.add(_AttributeSlot(module.get_submodule(owner), name, is_parameter=True))
        self._slots += self._written
        self._keeping = {path: module.get_submodule(path) for path in keeping}

    def capture(self, copies: bool = True) -> ModuleSnapshot:
        """A snapshot; without `copies` it holds the buffers themselves, which must then not be written."""
        attributes = [
            (module, {name: value for name, value in module.__dict__.items() if name not in TORCHS})
            for module in self._modules
        ]
        tensors = []
        for slot in self._slots:
            tensor = slot.holder.get(slot.name)
            if tensor is not None:
                wanted = copies and (tensor.numel() <= COPIED_ELEMENTS or slot in self._written)
                kept = _copy(tensor) if wanted else None
                tensors.append((slot, tensor, tensor._version, kept))
        deep = PythonState(self._keeping) if self._keeping else None
        return ModuleSnapshot(attributes, tensors, deep)

    def note_written(self, before: ModuleSnapshot) -> None:
        """Record which buffers were written or replaced since `before`."""
        for slot, tensor, version, _ in before.tensors:
            if slot.holder.get(slot.name) is not tensor or tensor._version != version:
                self._written.add(slot)

    def put(self, remembered: ModuleSnapshot) -> None:
        """Restore the modules to a snapshot; copied tensors are replaced by their copies."""
        if remembered.deep is not None:
            remembered.deep.restore()
        for module, attributes in remembered.attributes:
            for name in [name for name in module.__dict__ if name not in TORCHS]:
                if name not in attributes:
                    del module.__dict__[name]
            module.__dict__.update(attributes)
        for slot, tensor, _, kept in remembered.tensors:
            slot.holder[slot.name] = tensor if kept is None else kept


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return Parameter(copy, tensor.requires_grad) if isinstance(tensor, Parameter) else copy
