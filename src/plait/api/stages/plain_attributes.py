"""Numbers and text that modules had when they were traced: a trace keeps them, whatever they become later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from plait.core.errors import InputError

_PLAIN = (bool, int, float, str, type(None))


class PlainAttributes:
    """The plain attributes of the modules of `model` that contain several of the traced `layers`.

    The code of other modules runs as it is.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        paths = {""}
        for layer in layers:
            parts = layer.partition("@")[0].split(".")
            paths |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
        modules = dict(model.named_modules())
        self._modules = {path: modules[path] for path in sorted(paths) if path in modules}
        self._before = {path: _plain(module) for path, module in self._modules.items()}

    def check(self) -> None:
        """Refuse a model with another value than the traced one."""
        for path, module in self._modules.items():
            if (now := _plain(module)) == self._before[path]:
                continue
            before = self._before[path]
            name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
            raise InputError(
                f"Pipeline: {f'{path}.{name}' if path else name} was {before.get(name)!r} when the model was "
                f"traced and is {now.get(name)!r} now, which its stages would not see; keep it in a buffer "
                "(a tensor), give it to forward as an input, or make another Pipeline"
            )


def _plain(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in _PLAIN and name != "training" and not name.startswith("_")
    }
