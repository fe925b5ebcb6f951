"""Attributes that are set later on a part of a fused module which runs trial by trial."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError

# What torch keeps in each module; their tensors, modes and hooks are followed in other ways.
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
# Hooks around forward and backward, which are those of the trials' modules.
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_ABSENT = object()


class LateAttributes:
    """Passes attributes that were set on `part` or in it since the last forward on to the trials' modules."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._seen = [(path, module, _own(module), _hooks(module)) for path, module in part.named_modules()]

    def pass_on(self, modules: Sequence[nn.Module]) -> None:
        for path, module, seen, hooks in self._seen:
            now = _own(module)
            if len(now) != len(seen) or any(seen.get(name, _ABSENT) is not now[name] for name in now):
                for number, own in enumerate(modules):
                    _change(own.get_submodule(path), seen, now, number)
                seen.clear()
                seen.update(now)
            # Forward hooks of the part itself are called, with the tensors of all trials.
            if _hooks(module) > hooks if path else any(getattr(module, name) for name in _BACKWARD):
                raise FusionError(
                    f"a hook on {path or type(module).__qualname__!r} would not be called: "
                    f"{type(self._part).__qualname__} runs trial by trial",
                    "register it on each model before these are fused",
                )


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _hooks(module: nn.Module) -> int:
    return sum([len(getattr(module, name)) for name in HOOKS])


def _of_trial(value: Any, number: int) -> Any:
    return value.stacked[number] if isinstance(value, TrialTensor) else copy.deepcopy(value)


def _change(module: nn.Module, seen: dict[str, Any], now: dict[str, Any], number: int) -> None:
    for name, value in now.items():
        if seen.get(name, _ABSENT) is not value:
            setattr(module, name, pytree.tree_map(lambda leaf: _of_trial(leaf, number), value))
    for name in seen.keys() - now.keys():
        vars(module).pop(name, None)
