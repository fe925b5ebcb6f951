"""Layers of a stage that are faster on a CPU than torch's own, with the same result."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable

from torch import nn
from torch.nn import Parameter

from plait.pipeline.cpu.gelu import quicken_gelu
from plait.pipeline.cpu.linear import add_weight_gradients, turn_weights


def quicken(
    module: nn.Module, add: bool = True, turn: bool = True, shared: Collection[Parameter] = ()
) -> list[nn.Module]:
    """Give layers of `module` faster forwards; the layers that have another forward now.

    `add`: linear layers add up the gradients of their weights. `turn`: on ARM, where that was measured to be
    better, their weights lie in memory another way, all but `shared`.
    """
    changed = add_weight_gradients(module) if add else []
    if platform.machine() in ("aarch64", "arm64"):
        changed += quicken_gelu(module)
        if turn:
            turn_weights(module, shared)
    return changed


def plain_forwards(layers: Iterable[nn.Module]) -> None:
    """Give layers that were changed the forwards of their kinds back."""
    for layer in layers:
        del layer.__dict__["forward"]
