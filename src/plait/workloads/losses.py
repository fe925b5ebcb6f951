"""Losses by name. Each returns the mean over the batch's samples, or over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

from plait.core.errors import JobError
from plait.core.names import check_arguments, did_you_mean, resolve

Loss = Callable[[Tensor, Tensor], Tensor]


def build_loss(kind: str, args: Mapping[str, Any] | None = None) -> Loss:
    """The loss called `kind`, with its options: one of `KINDS`, or a user's `package.module:name`.

    A user's name is a function of (output, target), or a class such as `torch.nn:L1Loss` whose instances
    are; it must return the mean over the batch.
    """
    loss = find_loss(kind)
    if isinstance(loss, type):
        check_arguments(loss, args or {}, "loss_args", JobError)
        return cast("Loss", _instance(loss, kind, args or {}))
    return _with_options(cast("Loss", loss), args or {})


def find_loss(kind: str) -> Callable[..., Any]:
    """The function or class that `kind` names."""
    if ":" in kind:
        loss: Callable[..., Any] = resolve(kind, "loss", JobError)
    elif kind in KINDS:
        loss = KINDS[kind]
    else:
        raise JobError(
            f"loss: unknown loss {kind!r}{did_you_mean(kind, KINDS)}; "
            f"a loss of your own is written 'package.module:name'"
        )
    if not callable(loss):
        raise JobError(f"loss: {kind} is {loss!r}, expected a function of (output, target)")
    return loss


def _with_options(loss: Loss, args: Mapping[str, Any]) -> Loss:
    check_arguments(loss, args, "loss_args", JobError, positional=2)
    return partial(loss, **args) if args else loss


def cross_entropy(output: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean cross entropy of logits (batch, classes) or (batch, time, vocabulary); classes come last."""
    _check_tensor(output, "cross-entropy")
    if output.shape[:-1] != target.shape:
        raise JobError(
            f"loss: cross-entropy found an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}; expected the target to have the output's shape without its last axis, "
            f"the classes"
        )
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=label_smoothing)


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the squared differences."""
    _check_tensor(output, "mse")
    if output.shape != target.shape:
        # Torch would broadcast the two, and train towards something nobody asked for.
        raise JobError(
            f"loss: mse found an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}; expected the same shape"
        )
    return F.mse_loss(output, target)


def _check_tensor(output: object, kind: str) -> None:
    if not isinstance(output, Tensor):
        raise JobError(
            f"loss: {kind} found that the model returned a {type(output).__name__}, expected a tensor; "
            f"write a loss of your own that takes the part it needs: loss: package.module:name"
        )


KINDS: Mapping[str, Loss] = {"cross-entropy": cross_entropy, "mse": mean_squared_error}


def _instance(loss: type, kind: str, args: Mapping[str, Any]) -> object:
    try:
        made: object = loss(**args)
    except (TypeError, ValueError) as failure:
        raise JobError(f"loss: {kind} cannot be made with {dict(args)}: {failure}") from failure
    if not callable(made):
        raise JobError(f"loss: {kind} is {made!r}, expected a function of (output, target)")
    return made
