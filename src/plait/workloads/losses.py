"""Losses by name. Each returns the mean over the batch's samples, or over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.errors import JobError, PlaitError
from plait.core.names import check_arguments, did_you_mean, resolve
from plait.core.shown import shown

Loss = Callable[[Any, Any], Tensor]
# The model computes its loss itself.
MODEL_LOSS = "model"


def build_loss(kind: str, args: Mapping[str, Any] | None = None) -> Loss:
    """The loss called `kind`, with its options: one of `KINDS`, or a user's `package.module:name`.

    A user's name is a function of (output, target), or a class such as `torch.nn:L1Loss` whose instances
    are; it must return the mean over the batch.
    """
    loss = find_loss(kind)
    if isinstance(loss, type):
        check_arguments(loss, args or {}, "loss_args", JobError)
        made = _instance(loss, kind, args or {})
        _refuse_weights(made, kind)
        return OwnLoss(kind, cast("Loss", made))
    _refuse_weights(loss, kind)
    check_arguments(loss, args or {}, "loss_args", JobError, positional=2)
    options = dict(args or {})
    if loss.__module__.startswith("plait."):
        _check_smoothing(options)
    if loss is cross_entropy and options.get("weight") is not None:
        options["weight"] = ClassWeights(options["weight"])
    with_options = partial(loss, **options) if options else loss
    return with_options if kind in KINDS else OwnLoss(kind, with_options)


def _check_smoothing(options: Mapping[str, Any]) -> None:
    for name in ("label_smoothing", "smoothing"):
        value = options.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise JobError(f"loss_args.{name}: found {shown(value)}, expected a number from 0 to 1")


# Advice for a loss with parameters.
IN_THE_MODEL = (
    "make it part of the model: let forward take the target, call it and return {'loss': ..., ...}, and use "
    "loss: model"
)


def _refuse_weights(made: object, kind: str) -> None:
    """Raise for a loss with parameters, which would be in no optimizer and no checkpoint."""
    if isinstance(made, torch.nn.Module):
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                raise JobError(
                    f"loss: {kind} has a parameter {name!r}, which would not be trained; {IN_THE_MODEL}"
                )


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


class OwnLoss:
    """A user's loss with a checked result; its errors also describe the arguments."""

    def __init__(self, kind: str, loss: Loss) -> None:
        self.kind = kind
        self.loss = loss

    def __call__(self, output: Any, target: Any) -> Tensor:
        try:
            value: Any = self.loss(output, target)
        except PlaitError:
            raise
        except Exception as failure:
            failure.add_note(
                f"loss: {self.kind} was called with {describe(output)} as the output and {describe(target)} "
                f"as the target"
            )
            raise
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(())
        raise JobError(
            f"loss: {self.kind} returned {describe(value)}, expected one number, the mean over the batch, "
            f"as a tensor; end it with .mean()"
        )


def describe(value: Any) -> str:
    """A short description of `value`: `a float32 tensor of shape (4, 10)`, `a list of 4 str`."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if isinstance(value, (tuple, list)):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {len(value)} {' and '.join(kinds)}"
    return "None" if value is None else f"a {type(value).__name__}"


def cross_entropy(
    output: Tensor, target: Tensor, label_smoothing: float = 0.0, weight: ClassWeights | None = None
) -> Tensor:
    """The mean cross entropy of logits (batch, classes) or (batch, time, vocabulary); classes are last.

    With `weight`, one number per class, it is the mean weighted by those of the targets.
    """
    _check_tensor(output, "cross-entropy")
    target = _class_numbers(target)
    if output.shape[:-1] != target.shape:
        raise JobError(
            f"loss: cross-entropy found an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}; expected the target to have the output's shape without its last axis, "
            f"the classes"
        )
    return F.cross_entropy(
        output.flatten(0, -2),
        target.flatten(),
        weight=None if weight is None else weight.like(output),
        label_smoothing=label_smoothing,
    )


def _class_numbers(target: Any) -> Tensor:
    if not isinstance(target, Tensor):
        raise JobError(
            f"loss: cross-entropy found {describe(target)} as the target, expected a tensor with the "
            f"number of each sample's class; give numbers as targets, 0 for the first class"
        )
    if target.is_floating_point() or target.dtype is torch.bool or target.is_complex():
        raise JobError(
            f"loss: cross-entropy found {describe(target)} as the target, expected class numbers, which are "
            f"integers; convert them with int() or .long(); for chances of classes use "
            f"loss: torch.nn:CrossEntropyLoss, for one output a sample torch.nn:BCEWithLogitsLoss"
        )
    return target if target.dtype is torch.int64 else target.long()


class ClassWeights:
    """One weight per class, as a tensor on any device."""

    def __init__(self, numbers: Any) -> None:
        is_list = isinstance(numbers, (list, tuple)) and bool(numbers)
        if not is_list or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
            raise JobError(
                f"loss_args.weight: found {numbers!r}, expected a list with a number for each class"
            )
        self._numbers = [float(number) for number in numbers]
        self._made: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, output: Tensor) -> Tensor:
        """The weights on the device of `output`, whose last axis is the classes."""
        if len(self._numbers) != output.shape[-1]:
            raise JobError(
                f"loss_args.weight: found {len(self._numbers)} numbers, but the model has {output.shape[-1]} "
                f"classes; expected one for each"
            )
        key = output.dtype, output.device
        if key not in self._made:
            made = torch.tensor(self._numbers, dtype=output.dtype, device=output.device)
            if type(made) is not Tensor:  # a fake tensor, which must not be cached
                return made
            # Cached, since a CUDA graph cannot contain the copy to a GPU.
            self._made[key] = made
        return self._made[key]


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean of the squared differences."""
    _check_tensor(output, "mse")
    if not isinstance(target, Tensor):
        raise JobError(f"loss: mse found {describe(target)} as the target, expected a tensor of numbers")
    if output.shape != target.shape:
        # Torch would broadcast the two, and train towards something else.
        raise JobError(
            f"loss: mse found an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}; expected the same shape"
        )
    if target.dtype is torch.float64 and output.dtype is not torch.float64:
        # Python's and numpy's numbers; torch would fail in backward.
        target = target.float()
    return F.mse_loss(output, target)


def _check_tensor(output: object, kind: str) -> None:
    if not isinstance(output, Tensor):
        has_loss = _find_loss_in(output) is not None
        advice = (
            "the output has its own loss: use loss: model"
            if has_loss
            else ("write a loss of your own that takes the part it needs: loss: package.module:name")
        )
        raise JobError(
            f"loss: {kind} found that the model returned a {type(output).__name__}, expected a tensor; "
            f"{advice}"
        )


def model_loss(output: Any, target: Any) -> Tensor:
    """The loss that the model computed: `output.loss`, `output["loss"]`, the first of a tuple, the output."""
    loss = _find_loss_in(output)
    if loss is None:
        raise JobError(
            f"loss: found 'model', but the model returned {describe(output)}, which holds no loss; expected "
            f"an output with .loss, a dict with 'loss', or a tuple whose first item is the loss, one number. "
            f"Most models compute it only where the batch has targets: see that the samples hold labels"
        )
    return loss


def _find_loss_in(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    return None


KINDS: Mapping[str, Loss] = {
    "cross-entropy": cross_entropy,
    "mse": mean_squared_error,
    MODEL_LOSS: model_loss,
}


def _instance(loss: type, kind: str, args: Mapping[str, Any]) -> object:
    try:
        made: object = loss(**args)
    except (TypeError, ValueError) as failure:
        raise JobError(f"loss: {kind} cannot be made with {dict(args)}: {failure}") from failure
    if not callable(made):
        raise JobError(f"loss: {kind} is {made!r}, expected a function of (output, target)")
    return made
