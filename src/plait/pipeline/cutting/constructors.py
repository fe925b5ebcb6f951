"""The source expression that constructs a torch.nn module like a given one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# Constructor arguments that the module does not keep, or that a stage sets differently.
_SKIPPED = frozenset({"self", "device", "dtype", "args", "kwargs", "_weight", "_freeze"})
_PLAIN = (int, float, bool, str, type(None), tuple, list)


class NoConstructor(Exception):
    """A module whose constructor call cannot be derived from the module; the message says what differs."""


def constructor(module: nn.Module) -> str:
    """The constructor call of a module, such as `nn.Conv2d(3, 64, 3, padding=1)`; checked by running it."""
    name = f"nn.{type(module).__name__}"
    if getattr(nn, type(module).__name__, None) is not type(module):
        raise NoConstructor("it is not one of torch.nn's own modules")
    arguments = _arguments(module)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    if dtype != torch.float32:
        arguments.append(f"dtype={dtype}")
    text = f"{name}({', '.join(arguments)})"
    _check(module, text)
    return text


def _arguments(module: nn.Module) -> list[str]:
    known = _kept(module)
    written = []
    by_position = True
    for parameter in _parameters(module):
        if parameter.name in _SKIPPED or parameter.name not in known:
            by_position = False
            continue
        value = _shortest(module, known[parameter.name], parameter.default)
        if parameter.default is not parameter.empty and value == parameter.default:
            by_position = False
        else:
            by_position = by_position and parameter.default is parameter.empty
            written.append(repr(value) if by_position else f"{parameter.name}={value!r}")
    return written


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    if isinstance(module, nn.RNNBase):  # declares only *args
        defaults: dict[str, Any] = {
            "num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False,
        }  # fmt: skip
        if isinstance(module, nn.LSTM):
            defaults["proj_size"] = 0
        if isinstance(module, nn.RNN):
            defaults["nonlinearity"] = "tanh"
        empty = inspect.Parameter.empty
        names = {"input_size": empty, "hidden_size": empty, **defaults}
        return [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in names.items()]
    return [p for p in inspect.signature(type(module)).parameters.values() if p.kind is not p.VAR_POSITIONAL]


def _kept(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments that `module` keeps as attributes, by name."""
    kept = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
    if "bias" in module._parameters:
        kept["bias"] = module.bias is not None
    if isinstance(module, nn.MultiheadAttention):
        kept["bias"] = module.in_proj_bias is not None
        kept["add_bias_kv"] = module.bias_k is not None
        for name in ("kdim", "vdim"):
            if kept[name] == module.embed_dim:
                kept[name] = None
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        kept |= {
            "d_model": module.self_attn.embed_dim,
            "nhead": module.self_attn.num_heads,
            "dim_feedforward": module.linear1.out_features,
            "dropout": module.dropout.p,
            "activation": getattr(module.activation, "__name__", "relu"),
            "layer_norm_eps": module.norm1.eps,
            "batch_first": module.self_attn.batch_first,
            "bias": module.linear1.bias is not None,
        }
    return kept


def _shortest(module: nn.Module, value: Any, default: Any) -> Any:
    """The value as an int if a convolution keeps it as a tuple, such as `(3, 3)` for 3."""
    is_even = isinstance(value, tuple) and len(set(value)) == 1 and isinstance(module, _ConvNd)
    return value[0] if is_even and (default is inspect.Parameter.empty or isinstance(default, int)) else value


def _check(module: nn.Module, text: str) -> None:
    """Raise NoConstructor unless `text` makes a module with the same submodules, settings and tensors."""
    try:
        with torch.device("meta"):
            twin: nn.Module = eval(text, {"nn": nn, "torch": torch})
    except Exception as failure:
        raise NoConstructor(f"{text} fails: {failure}") from failure
    ours, theirs = dict(module.named_modules()), dict(twin.named_modules())
    if ours.keys() != theirs.keys():
        raise NoConstructor(f"{text} has other submodules")
    for path, part in ours.items():
        # Attributes that a fresh module lacks were set from outside, and its forward does not use them.
        mine, fresh = _settings(part), _settings(theirs[path])
        if other := [name for name, value in fresh.items() if mine.get(name, value) != value]:
            raise NoConstructor(f"{text} has another {other[0]} in {path or 'itself'}")
    if _tensors(module) != _tensors(twin):
        raise NoConstructor(f"{text} has other parameters or buffers")
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in ours.values()):
        raise NoConstructor("it has hooks")


def _settings(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n != "training" and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    # A recurrent module keeps lists of its weights, which are not settings.
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)


def _tensors(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named}
