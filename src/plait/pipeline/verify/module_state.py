"""What modules keep from one forward to the next: buffers, and attributes in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Up to this many numbers a buffer is copied whether or not it has ever been written.
COPIED_ELEMENTS = 1 << 18
# Attributes of modules that are torch's own.
_TORCHS = frozenset([*nn.Module().__dict__, "_flat_weights", "_flat_weight_refs", "_flat_weights_names"])


@dataclass(frozen=True)
class _AttributeSlot:
    """A place in a module where a buffer hangs."""

    owner: nn.Module
    name: str


@dataclass(frozen=True)
class Remembered:
    """Attributes by module, and of each slot the buffer there, its version, and a copy where one was made."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]
    buffers: list[tuple[_AttributeSlot, Tensor, int, Tensor | None]]


class ModuleMemory:
    """What a forward may change in `module` and its parts, taken down and put back.

    Autograd counts no version for what batch normalisation writes, so every small buffer is copied; a large
    one only once it was seen to be written, since most are masks and tables.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._slots = [_AttributeSlot(owner, name) for owner in self._modules for name in owner._buffers]
        self._written: set[_AttributeSlot] = set()

    def capture(self, copies: bool = True) -> Remembered:
        """What there is now; without `copies` the buffers themselves, which nobody may write to meanwhile."""
        attributes = [
            (module, {name: value for name, value in module.__dict__.items() if name not in _TORCHS})
            for module in self._modules
        ]
        buffers = []
        for slot in self._slots:
            buffer = slot.owner._buffers.get(slot.name)
            if buffer is not None:
                wanted = copies and (buffer.numel() <= COPIED_ELEMENTS or slot in self._written)
                kept = buffer.detach().clone() if wanted else None
                buffers.append((slot, buffer, buffer._version, kept))
        return Remembered(attributes, buffers)

    def note_written(self, before: Remembered) -> None:
        """Find out which buffers a forward since `before` has written or replaced."""
        for slot, buffer, version, _ in before.buffers:
            if slot.owner._buffers.get(slot.name) is not buffer or buffer._version != version:
                self._written.add(slot)

    def put(self, remembered: Remembered) -> None:
        """Let the modules hold what they held; a buffer that was copied is its copy, to be written freely."""
        for module, attributes in remembered.attributes:
            for name in [name for name in module.__dict__ if name not in _TORCHS]:
                if name not in attributes:
                    del module.__dict__[name]
            module.__dict__.update(attributes)
        for slot, buffer, _, kept in remembered.buffers:
            slot.owner._buffers[slot.name] = buffer if kept is None else kept
