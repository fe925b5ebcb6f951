"""Replaced methods of modules, such as forwards of batch norms with a cumulative average."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.errors import FusionError

# Methods that are replaced.
REPLACED = ("forward", "generate", "save_pretrained", "flatten_parameters")


class Patch(partial[Any]):
    """A replaced method of a module; a trial that leaves the array gets the original one back."""


def patch_norms(module: nn.Module) -> None:
    """Replace the forward of batch norms without momentum, which read a counter that differs by trial."""
    for part in module.modules():
        is_patched = "forward" in vars(part)
        if (
            isinstance(part, _BatchNorm)
            and part.momentum is None
            and part.track_running_stats
            and not is_patched
        ):
            part.forward = Patch(_cumulative_norm, part)  # type: ignore[method-assign]


def patch_methods(module: nn.Module) -> None:
    """Replace methods of a model that outside of a fused call would find the weights of all trials."""
    for name in ("generate", "save_pretrained"):
        if callable(getattr(type(module), name, None)):
            vars(module)[name] = Patch(_of_one_trial, module, name)


def patch_recurrent(module: nn.Module) -> None:
    """Keep the weights of recurrent layers as they are: cuDNN's layout is for those of one model."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            vars(part)["flatten_parameters"] = Patch(_not_flattened, part)


def _not_flattened(part: nn.Module) -> None:
    pass


def _of_one_trial(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(p, TrialTensor) for part in module.modules() for p in part._parameters.values()):
        raise FusionError(
            f"{name}: found the module of all trials, expected that of one: call fused.trial(0).{name}(...)"
        )
    return getattr(type(module), name)(module, *args, **kwargs)


def _cumulative_norm(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Batch norm whose running statistics are the average over all batches so far."""
    norm._check_input_dim(x)
    mean, variance, counter = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert counter is not None
    if not norm.training:
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, False, 0.0, norm.eps)
    counter.add_(1)
    batch_mean, batch_variance = torch.zeros_like(mean), torch.zeros_like(variance)
    normal = F.batch_norm(x, batch_mean, batch_variance, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = 1.0 / counter.to(mean.dtype)
    mean.lerp_(batch_mean, share)
    variance.lerp_(batch_variance, share)
    return normal
