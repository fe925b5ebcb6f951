"""Finds model state that is in no checkpoint: attributes, globals, non-persistent buffers."""

from __future__ import annotations

from typing import Any

from torch import nn

from plait.verification.attributes import read_attributes
from plait.verification.replay import keeping_attributes


class UnsavedState:
    """State of a model that changes in training and is not in its `state_dict`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = self._read()

    def changed(self) -> list[str]:
        """The names of state that has changed since the last call.

        What was made first meanwhile may be a cache: it counts once it changes.
        """
        before, self._known = self._known, self._read()
        return [name for name, now in self._known.items() if before.get(name, now) not in (now, "None")]

    def _read(self) -> dict[str, str]:
        modules = {
            path: module
            for path, module in keeping_attributes(self._model).items()
            if type(module).get_extra_state is nn.Module.get_extra_state
        }
        values: dict[str, Any] = dict(read_attributes(modules).values)
        for path, module in self._model.named_modules():
            for name in getattr(module, "_non_persistent_buffers_set", ()):
                buffer = module._buffers.get(name)
                kept = None if buffer is None else (buffer.shape, float(buffer.detach().double().sum()))
                values[f"{path}.{name}".lstrip(".")] = kept
        # Compared as text, so that NaN equals NaN.
        return {name: repr(value) for name, value in values.items()}
