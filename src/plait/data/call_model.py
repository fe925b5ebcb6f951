"""Calls a user's model with a batch: arguments, training mode, and errors about dtypes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.core.errors import DataError, JobError

_COMPILERS = ("c++", "g++", "clang++")
Arguments = tuple[Any, ...] | dict[str, Any]


def fused_parts(model: torch.nn.Module) -> list[Any]:
    """The fused modules in `model`, which may be one, without an import of what makes them."""
    return [part for part in model.modules() if hasattr(type(part), "batch_rows")]


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context in evaluation mode, by the model's `eval` and `train`, which may do more than set the mode.

    Submodules that were in another mode than the model are restored to it.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])
        for module, mode in before:
            if module.training != mode:
                module.train(mode)
        for module, mode in before:
            module.training = mode


def compile_in_place(module: torch.nn.Module, device: torch.device, key: str) -> None:
    """Let `module` run compiled from its next call on, by torch.compile; its names and state stay the same.

    It draws the random numbers that it would draw otherwise. `key` is what asks for it, for the error where
    the device needs a compiler that is not there.
    """
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else _COMPILERS
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise JobError(
            f"{key}: torch.compile on the CPU needs a C++ compiler, and there is none of "
            f"{', '.join(compilers)}; install one (apt install g++), or leave {key} out"
        )
    module.compile(options={"fallback_random": True})


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a model is what torch.compile returned, or is compiled in place."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def has_modes(optimizer: object) -> bool:
    """Whether an optimizer has other weights for evaluation than for training, as schedule-free ones do."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def set_mode(optimizer: Any, training: bool) -> None:
    """Put an optimizer that has modes into one of them."""
    if has_modes(optimizer):
        optimizer.train() if training else optimizer.eval()


@contextlib.contextmanager
def evaluated_weights(optimizer: object) -> Iterator[None]:
    """Switch an optimizer with modes, such as a schedule-free one, to the weights for evaluation."""
    set_mode(optimizer, training=False)
    try:
        yield
    finally:
        set_mode(optimizer, training=True)


def forward(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output; several inputs are a tuple or list, named ones a dict."""
    arguments = as_arguments(inputs)
    with explaining_type_errors(model, inputs):
        return model(**arguments) if isinstance(arguments, dict) else model(*arguments)


def as_arguments(inputs: Any) -> Arguments:
    """The inputs of a batch as arguments of a model, positional or by name."""
    if isinstance(inputs, dict):
        return inputs
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


@contextlib.contextmanager
def explaining_type_errors(model: torch.nn.Module, inputs: Any) -> Iterator[None]:
    """Context that explains a failure of forward due to float64 inputs, as from numpy, with other weights."""
    try:
        yield
    except Exception as failure:
        if message := _unlike_types(model, inputs, failure):
            raise DataError(message) from failure
        raise


def _unlike_types(model: torch.nn.Module, inputs: Any, failure: Exception) -> str:
    if "double" not in str(failure).lower():
        return ""
    doubles = any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in tree_leaves(inputs))
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float64)
    if not doubles or weights is torch.float64:
        return ""
    return (
        f"data.kind: the inputs are float64, the model's weights {str(weights).removeprefix('torch.')}; give "
        f"samples as float32 (x.float(), or array.astype('float32')), or set precision: float64 ({failure})"
    )
