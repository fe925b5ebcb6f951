"""Layers of a shared base that a GPU computes at once: linear layers with a LoRA adapter, RMS norms.

Their own forwards take a dozen passes over memory, most of them casts. A forward that these do not cover, of
any option or on a CPU, is the layer's own.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.modules import module as module_hooks

from plait.fusion.dispatch import alias_links
from plait.fusion.dispatch.per_trial import PerTrial, on_device
from plait.fusion.dispatch.tensor import TrialTensor
from plait.fusion.forward_patches import Patch
from plait.fusion.kernels import HALF, can_run_on

_LORA = "peft.tuners.lora.layer", "Linear"
# Rows on which a norm is compared with torch's function, and how far it may be from that.
_PROBE_ROWS, _PROBE_ERROR = 4, 1e-4
# The random streams of each layer's first forward, which tell it from the next ones.
_first_forwards: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


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
    if type(x) is not TrialTensor or not x.is_cuda or x.dtype not in HALF or x.dim() < 2:
        return False
    return can_run_on(x.stacked) and not torch.is_autocast_enabled("cuda") and not _watches_all()


def _adapted_linear(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's LoRA of a linear layer."""
    name = None if args or kwargs or not _rows_on_gpu(x) else _only_adapter(layer)
    if name is None or not _is_plain_linear(base := layer.base_layer, x):
        return _own_forward(layer, x, *args, **kwargs)
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    weights = down.weight, up.weight
    from plait.fusion.kernels.low_rank import MOST_RANK, adapted_linear  # needs Triton

    if not all(_is_adapter(part, x) for part in (down, up)) or len(weights[0]) > MOST_RANK:
        return _own_forward(layer, x)
    if not _draws_at_once(dropout, x):
        return _own_forward(layer, x)
    scales = _each(layer.scaling[name], x)
    chances = _each(dropout.p, x) if dropout.training and type(dropout) is nn.Dropout else ()
    keys = x.trials.streams.dropout_keys(chances) if any(chances) else None
    if keys is not None:
        # The mask itself is of zeros and ones.
        scales = tuple(s / (1.0 - p) if p < 1.0 else 0.0 for s, p in zip(scales, chances))
    a, b = (weight.stacked for weight in weights)
    with torch._C.DisableTorchFunction():
        scale = on_device(scales, torch.float32, x.device)
        y = adapted_linear(_input(layer, x), base.weight, base.bias, a, b, scale, keys)
    return _output(y, x)


def _input(layer: nn.Module, x: TrialTensor) -> Tensor:
    """What a layer reads and keeps for backward: x, or a copy if the model writes to x later (h += layer(h)).

    The layer's own forward keeps a cast. Whether x is written to is known after a layer's first forward.
    """
    inner, streams = x.stacked, x.trials.streams
    alias_links.note_reader(inner, layer)
    is_first = _first_forwards.setdefault(layer, streams) is streams
    if torch.is_grad_enabled() and (is_first or layer in alias_links.readers_of_written):
        return inner.clone()
    return inner


def _output(y: Tensor, x: TrialTensor) -> TrialTensor:
    made = TrialTensor(y, x.trials)
    made.rows_at = x.rows_at
    return made


def _each(value: float, x: TrialTensor) -> tuple[float, ...]:
    """A number of each trial."""
    return value.values if isinstance(value, PerTrial) else (float(value),) * x.trials.count


def _only_adapter(layer: Any) -> str | None:
    """The name of the one adapter that is added; None if it is otherwise."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (name,) = layer.active_adapters
    return name if name in layer.lora_A and name not in layer.lora_variant else None


def _draws_at_once(dropout: nn.Module, x: TrialTensor) -> bool:
    """Whether a dropout is torch's, and what it drops is drawn for all trials at once."""
    if type(dropout) not in (nn.Identity, nn.Dropout) or _is_watched(dropout):
        return False
    return x.trials.rows is None or not x.rows_at


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
        return _output(F.rms_norm(_input(norm, x), weight.shape, weight, _epsilon(norm)), x)


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def _is_rms_norm(part: nn.Module) -> bool:
    """Whether a module has one shared weight and computes what torch's function does, tried on a few rows."""
    weight = part._parameters.get("weight")
    held = len(part._parameters) + len(part._buffers) + len(part._modules)
    if weight is None or held != 1 or weight.dim() != 1 or weight.requires_grad or weight.is_meta:
        return False
    # A copy on fake tensors, which have no values to compare, has crashed torch (seen with 2.13).
    if _epsilon(part) is None or _is_watched(part) or detect_fake_mode() is not None:
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
