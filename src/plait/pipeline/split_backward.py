"""Split backward: input gradients first, which the previous stage needs; weight gradients are deferred.

In a forward under `DeferWeights`, linear layers and convolutions are recorded such that their backward
computes only the input gradient and adds a job for the weight gradient. Other operations compute both at
once. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.pipeline.cpu.linear import add_product, add_sum, input_gradient, is_trained, with_same_strides

Job = Callable[[], None]
_active: ContextVar[DeferWeights | None] = ContextVar("deferred weight gradients", default=None)

_CONVOLUTIONS: dict[Any, int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_CONVOLUTION_ARGUMENTS = ("bias", "stride", "padding", "dilation", "groups")
_CONVOLUTION_DEFAULTS = (None, 1, 0, 1, 1)


class DeferWeights(TorchFunctionMode):
    """Active around a forward pass; backward then appends the deferred work to `jobs`.

    The jobs read `grads`, which must not be written before the jobs have run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        self.grads: list[Tensor] = []

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        _active.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and _can_defer(args, kwargs):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return _Linear.apply(_as_computed(args[0]), args[1], bias, self)  # type: ignore[no-untyped-call]
        if func in _CONVOLUTIONS and _can_defer(args, kwargs):
            settings = _settings(_CONVOLUTIONS[func], args[2:], kwargs)
            if settings is not None:
                return _Convolution.apply(_as_computed(args[0]), args[1], *settings, self)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def leave(self, job: Job, grad: Tensor) -> None:
        """Defer a job that reads `grad`."""
        self.jobs.append(job)
        self.grads.append(grad)

    def catch_up(self) -> None:
        """Run all jobs, then drop them and their inputs to break reference cycles with the graph."""
        for job in self.jobs:
            job()
        self.jobs.clear()
        self.grads.clear()


def jobs_of_this_forward() -> list[Job] | None:
    """The list for deferred weight gradients of the current forward; None if backward is not split."""
    defer = _active.get()
    return None if defer is None else defer.jobs


def deferring(weight: Tensor, bias: Tensor | None) -> DeferWeights | None:
    """Where a layer of the current forward leaves its weight gradients; None if it computes them at once.

    Both tensors have to be parameters: a computed one needs its gradient at once.
    """
    active = _active.get()
    if active is None:
        return None
    parameters = [weight] if bias is None else [weight, bias]
    can_defer = torch.is_grad_enabled() and all(map(is_trained, parameters))
    return active if can_defer and not _casts(weight) else None


def _can_defer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether weight and bias are trained leaf parameters; computed tensors need their gradient at once."""
    if len(args) < 2 or "weight" in kwargs or "input" in kwargs:
        return False
    weight, bias = args[1], args[2] if len(args) > 2 else kwargs.get("bias")
    if not is_trained(weight) or not (bias is None or is_trained(bias)):
        return False
    # Autocast does not cast float64.
    wide = torch.float64 in (args[0].dtype, weight.dtype)
    return torch.is_grad_enabled() and not (wide and _casts(weight))


def _casts(tensor: Tensor) -> bool:
    """Whether autocast casts `tensor`."""
    return torch.is_autocast_enabled(tensor.device.type)


def _as_computed(x: Tensor) -> Tensor:
    """A layer's input, cast as autocast would cast it."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _casts(x) else x


def _like(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to(x.dtype)


def _settings(dims: int, given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Bias, stride, padding, dilation, groups; None if the padding is given as a string."""
    values: dict[str, Any] = dict(zip(_CONVOLUTION_ARGUMENTS, _CONVOLUTION_DEFAULTS))
    values |= dict(zip(_CONVOLUTION_ARGUMENTS, given)) | kwargs
    if isinstance(values["padding"], str):
        return None
    spread = [_spread(values[name], dims) for name in ("stride", "padding", "dilation")]
    return values["bias"], *spread, values["groups"]


def _spread(value: Any, dims: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * dims if len(numbers) == 1 else numbers


def accumulate(parameter: Tensor | None, gradient: Tensor | None) -> None:
    """Add to the gradient of a parameter, if both exist."""
    if parameter is not None and gradient is not None and parameter.requires_grad:
        if parameter.grad is None:
            # Fused optimizers need parameter and gradient to have the same strides.
            parameter.grad = with_same_strides(parameter, gradient.to(parameter.dtype))
        else:
            parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, defer: DeferWeights) -> Tensor:
        ctx.leaves, ctx.defer = (weight, bias), defer
        used = weight.to(x.dtype)
        ctx.save_for_backward(x, used)
        return F.linear(x, used, _like(x, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves
        rows = grad.reshape(-1, grad.shape[-1])

        def job() -> None:
            inputs = x.reshape(-1, x.shape[-1])
            if leaf.dtype == rows.dtype:
                add_product(leaf, rows, inputs)
            else:
                accumulate(leaf, rows.t() @ inputs)
            if bias is not None and bias.dtype == rows.dtype:
                add_sum(bias, rows)
            elif bias is not None:
                accumulate(bias, rows.sum(0))

        ctx.defer.leave(job, grad)
        grad_input = input_gradient(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_input, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *settings, defer = rest
        ctx.leaves, ctx.defer, ctx.settings = (weight, bias), defer, settings
        used = weight.to(x.dtype)
        ctx.save_for_backward(x, used)
        stride, padding, dilation, groups = settings
        return torch.convolution(
            x, used, _like(x, bias), stride, padding, dilation, False, (0,) * len(stride), groups
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves
        stride, padding, dilation, groups = ctx.settings

        def gradients(mask: list[bool]) -> tuple[Tensor | None, ...]:
            sizes = None if bias is None else list(bias.shape)
            computed: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
                grad, x, weight, sizes, stride, padding, dilation, False, [0] * len(stride), groups, mask
            )
            return computed

        def job() -> None:
            _, weight_grad, bias_grad = gradients([False, True, bias is not None])
            accumulate(leaf, weight_grad)
            accumulate(bias, bias_grad)

        ctx.defer.leave(job, grad)
        grad_input = gradients([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return grad_input, *[None] * (len(ctx.settings) + 3)
