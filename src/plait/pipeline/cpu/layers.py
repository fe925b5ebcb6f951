"""Replaces layers of a stage by faster CPU implementations, with the same result."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable

from torch import nn
from torch.nn import Parameter

from plait.pipeline.cpu.gelu import use_fast_gelu
from plait.pipeline.cpu.linear import add_weight_gradients, transpose_weights


def use_fast_layers(
    module: nn.Module, add: bool = True, transpose: bool = True, shared: Collection[Parameter] = ()
) -> list[nn.Module]:
    """Replace the forwards of layers in `module` by faster ones; returns the replaced layers.

    `add`: linear layers accumulate their weight gradients in place. `transpose`: on ARM, where it was
    measured to be faster, their weights are stored transposed, except `shared`.
    """
    changed = add_weight_gradients(module) if add else []
    if platform.machine() in ("aarch64", "arm64"):
        changed += use_fast_gelu(module)
        if transpose:
            transpose_weights(module, shared)
    return changed


def plain_forwards(layers: Iterable[nn.Module]) -> None:
    """Restore the class's forward on layers that `use_fast_layers` changed."""
    for layer in layers:
        del layer.__dict__["forward"]
