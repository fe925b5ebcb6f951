"""Layers of a shared base that a GPU computes at once: linear layers with a LoRA adapter, RMS norms.

Their own forwards take a dozen passes over memory, most of them casts. A forward that these do not cover, of
any option or on a CPU, is the layer's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.forward_patches import Patch
from plait.fusion.kernels import can_run_on
from plait.fusion.trials.per_trial import PerTrial, on_device

_HALF = (torch.bfloat16, torch.float16)
_LORA = "peft.tuners.lora.layer", "Linear"
# Rows on which a norm is compared with torch's function, and how far it may be from that.
_PROBE_ROWS, _PROBE_ERROR = 4, 1e-4


def patch_layers(module: nn.Module) -> None:
    """Let the layers of a fused module that can be computed at once be."""
    for part in module.modules():
        if "forward" in vars(part):
            continue
        if (type(part).__module__, type(part).__name__) == _LORA:
            part.forward = Patch(_adapted_linear, part)
        elif type(part).__name__.endswith("RMSNorm") and _is_rms_norm(part):
            part.forward = Patch(_rms_norm, part)


def _own_forward(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(part).forward(part, *args, **kwargs)


def _rows_on_gpu(x: Any) -> bool:
    """Whether `x` has rows of each trial in 16 bits on a GPU, and nothing else is to be done with it."""
    if type(x) is not TrialTensor or not x.is_cuda or x.dtype not in _HALF or x.dim() < 2:
        return False
    return can_run_on(x.stacked) and not torch.is_autocast_enabled("cuda") and not _watches_all()


def _adapted_linear(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's LoRA of a linear layer."""
    name = None if args or kwargs or not _rows_on_gpu(x) else _only_adapter(layer)
    if name is None or not _is_plain_linear(base := layer.base_layer, x):
        return _own_forward(layer, x, *args, **kwargs)
    down, up, scale = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
    weights = down.weight, up.weight
    from plait.fusion.kernels.low_rank import MOST_RANK, adapted_linear  # needs Triton

    if not all(_is_adapter(part, x) for part in (down, up)) or len(weights[0]) > MOST_RANK:
        return _own_forward(layer, x)
    values = scale.values if isinstance(scale, PerTrial) else (float(scale),) * x.trials.count
    a, b = (weight.stacked for weight in weights)
    inner = x.stacked
    with torch._C.DisableTorchFunction():
        scales = on_device(values, torch.float32, inner.device)
        y = adapted_linear(inner, base.weight, base.bias, a, b, scales)
    return TrialTensor(y, x.trials)


def _only_adapter(layer: Any) -> str | None:
    """The name of the one adapter that is added, without dropout; None if it is otherwise."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or name in layer.lora_variant:
        return None
    dropout = layer.lora_dropout[name]
    keeps = type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.training)
    return name if keeps and not _is_watched(dropout) else None


def _is_plain_linear(base: nn.Module, x: Tensor) -> bool:
    """Whether a layer is torch's linear one, frozen and shared by all trials."""
    tensors = [tensor for tensor in base._parameters.values() if tensor is not None]
    shared = not any(isinstance(each, TrialTensor) or each.requires_grad for each in tensors)
    return _is_untouched(base) and shared and all(each.dtype == x.dtype for each in tensors)


def _is_adapter(part: nn.Module, x: Tensor) -> bool:
    weight: Any = part._parameters["weight"] if _is_untouched(part) else None
    own = isinstance(weight, TrialTensor) and weight.dtype in (torch.float32, x.dtype)
    return own and part._parameters["bias"] is None


def _is_untouched(part: nn.Module) -> bool:
    """Whether a module is a linear layer as torch has it, without hooks or a replaced forward."""
    return type(part) is nn.Linear and not _is_watched(part)


def _is_watched(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return any(hooks) or "forward" in vars(part)


def _watches_all() -> bool:
    """Whether hooks of all modules are registered, which want to see each layer's parts."""
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    found = [getattr(module_hooks, name) for name in (*names, "_global_backward_pre_hooks")]
    return any(found)


def _rms_norm(norm: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    weight = norm.weight
    if args or kwargs or not _rows_on_gpu(x) or isinstance(weight, TrialTensor) or weight.dtype != x.dtype:
        return _own_forward(norm, x, *args, **kwargs)
    with torch._C.DisableTorchFunction():
        return TrialTensor(F.rms_norm(x.stacked, weight.shape, weight, _epsilon(norm)), x.trials)


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _is_rms_norm(part: nn.Module) -> bool:
    """Whether a module has one shared weight and computes what torch's function does, tried on a few rows."""
    weight = part._parameters.get("weight")
    held = len(part._parameters) + len(part._buffers) + len(part._modules)
    if weight is None or held != 1 or weight.dim() != 1 or weight.requires_grad or weight.is_meta:
        return False
    if _epsilon(part) is None or _is_watched(part):
        return False
    try:
        alone, size = copy.deepcopy(part).float(), _PROBE_ROWS * len(weight)
        rows = torch.arange(size, device=weight.device, dtype=torch.float32).sin().view(1, _PROBE_ROWS, -1)
        # In rows of small numbers the epsilon is what counts.
        x = torch.cat([rows, 1e-3 * rows])
        found = F.rms_norm(x, weight.shape, weight.float(), _epsilon(part))
        both = [alone.train(mode)(x) for mode in (True, False)]
        half = alone.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
        return half and all(torch.allclose(found, own, rtol=_PROBE_ERROR, atol=0.0) for own in both)
    except Exception:  # it has another form, and its own forward
        return False
