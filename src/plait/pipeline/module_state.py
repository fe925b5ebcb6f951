"""What modules keep from one forward to the next: buffers, weights that forward writes, state in Python."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from plait.verification.python_state import TORCHS, PythonState

# Up to this many numbers a buffer is copied whether or not it has ever been written.
COPIED_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class _AttributeSlot:
    """A place in a module where a buffer, or a parameter that forward writes, hangs."""

    owner: nn.Module
    name: str
    is_parameter: bool = False

    @property
    def holder(self) -> dict[str, Any]:
        return self.owner._parameters if self.is_parameter else self.owner._buffers


@dataclass(frozen=True)
class Remembered:
    """Attributes by module, and of each slot the tensor there, its version, and a copy where one was made.

    `deep` is what some modules keep in containers, objects and globals.
    """

    attributes: list[tuple[nn.Module, dict[str, Any]]]
    tensors: list[tuple[_AttributeSlot, Tensor, int, Tensor | None]]
    deep: PythonState | None


class ModuleMemory:
    """What a forward may change in `module` and its parts, taken down and put back.

    Autograd counts no version for what batch normalisation writes, so every small buffer is copied; a large
    one only once it was seen to be written, since most are masks and tables. `written` names parameters that
    forward writes, and `keeping` the parts that keep more in Python than the values of attributes.
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

    def capture(self, copies: bool = True) -> Remembered:
        """What there is now; without `copies` the buffers themselves, which nobody may write to meanwhile."""
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
        return Remembered(attributes, tensors, deep)

    def note_written(self, before: Remembered) -> None:
        """Find out which buffers a forward since `before` has written or replaced."""
        for slot, tensor, version, _ in before.tensors:
            if slot.holder.get(slot.name) is not tensor or tensor._version != version:
                self._written.add(slot)

    def put(self, remembered: Remembered) -> None:
        """Let the modules hold what they held; a tensor that was copied is its copy, to be written freely."""
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
