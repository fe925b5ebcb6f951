"""Element by element: operands broadcast behind the trials axis, and torch's own function does the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.errors import FusionError, user_line
from plait.fusion.fallback import is_in_place, refuse_shared_target
from plait.fusion.per_trial import PerTrial, on_device
from plait.fusion.registry import (
    RULES,
    Arguments,
    Function,
    Options,
    arguments_of,
    getter,
    rule,
    spellings,
    takes_per_trial,
)
from plait.fusion.tensor import TrialTensor, trials_of, unwrap, wrap

_UNARY = (
    "abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil conj conj_physical cos cosh "
    "deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 isfinite isinf isnan isneginf "
    "isposinf isreal lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative positive "
    "rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc "
    "__neg__ __pos__ __invert__ __abs__ relu relu6 elu selu celu gelu silu mish softplus softsign "
    "tanhshrink hardtanh hardswish hardsigmoid leaky_relu logsigmoid log_sigmoid threshold hardshrink "
    "softshrink clone detach contiguous to float double half bfloat16 int long bool type type_as cpu cuda "
    "requires_grad_ detach_ zero_ fill_ zeros_like ones_like full_like empty_like real imag clamp "
    "clamp_min clamp_max clip xlogy entr relu_ relu6_ elu_ selu_ celu_ leaky_relu_ hardtanh_ threshold_ "
    "sigmoid_ tanh_ exp_ sqrt_ neg_ abs_ clamp_ clamp_min_ clamp_max_ reciprocal_ floor_ round_ log_ "
    "square_ rsqrt_ cos_ sin_"
)
_SEVERAL = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power "
    "maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge greater greater_equal less less_equal "
    "not_equal isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor copysign "
    "where lerp addcmul addcdiv masked_fill rsub logaddexp logaddexp2 heaviside nextafter __add__ "
    "__radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ "
    "__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ "
    "__or__ __xor__ __rand__ __ror__ __rxor__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ "
    "__iand__ __ior__ __ixor__ add_ sub_ mul_ div_ pow_ copy_ lerp_ addcmul_ addcdiv_ masked_fill_ "
    "subtract_ multiply_ divide_ fmod_ remainder_ logical_and_ logical_or_ logical_not_"
)


def unary(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A function of one tensor, whatever its other arguments: applied to all trials as they lie."""
    x = args[0] if args else kwargs["input"]
    others = args[1:]
    if not isinstance(x, TrialTensor) or any(isinstance(other, TrialTensor) for other in others):
        return elementwise(function, args, kwargs)
    outcome = function(x.stacked, *others, **{k: v for k, v in kwargs.items() if k != "input"})
    return x if outcome is x.stacked else TrialTensor(outcome, x.trials)


@takes_per_trial
def elementwise(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A function of several tensors that broadcast: a tensor's own axes end up behind the trials."""
    if "out" in kwargs:
        raise FusionError(f"{user_line()}\n  writes to out=...; a fused model cannot; use what is returned")
    trials = trials_of(args, kwargs)
    if is_in_place(function) and not isinstance(args[0], TrialTensor):
        if not function.__name__.startswith("__i"):
            refuse_shared_target(function, args)
        function = getattr(torch.Tensor, "__" + function.__name__[3:])
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    dims = max(operand.dim() for operand in operands)
    like = next(operand for operand in operands if isinstance(operand, TrialTensor))
    placed = [place(value, dims, like) for value in args]
    named = {name: place(value, dims, like) for name, value in kwargs.items()}
    outcome = function(*placed, **named)
    return args[0] if is_in_place(function) else wrap(outcome, trials)


def place(value: Any, dims: int, like: TrialTensor) -> Any:
    """`value` as an operand for all trials: (trials, 1..., *its shape), `dims` axes behind the trials."""
    if isinstance(value, PerTrial):
        # A number takes part in type promotion as a number does: it follows the tensor's type.
        kind = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return on_device(value.values, kind, like.device).view(-1, *(1,) * dims)
    if not isinstance(value, TrialTensor):
        return value
    inner, own = value.stacked, value.stacked.dim() - 1
    if own == dims:
        return inner
    if own == 0 and inner.is_floating_point() and like.is_floating_point():
        # A lone scalar tensor would not widen the result's type; with the trials axis it would.
        inner = inner.to(like.dtype) if like.dim() else inner
    return inner.view(inner.shape[0], *(1,) * (dims - own), *inner.shape[1:])


for _spelling in spellings(_UNARY.split()):
    RULES[_spelling] = unary
for _spelling in spellings(_SEVERAL.split()):
    RULES[_spelling] = elementwise
RULES[getter("data")] = lambda f, args, kwargs: TrialTensor(args[0].stacked.data, args[0].trials)
# What autograd knows, it knows of the inner tensor.
RULES[getter("requires_grad")] = lambda f, args, kwargs: args[0].stacked.requires_grad
RULES[getter("is_leaf")] = lambda f, args, kwargs: args[0].stacked.is_leaf
RULES[getter("grad_fn")] = lambda f, args, kwargs: args[0].stacked.grad_fn


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def new(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A new tensor like a trial's: one for each trial, since the model may write into it."""
    x = args[0]
    shared = function(x.stacked, *args[1:], **kwargs)
    return TrialTensor(unwrap(shared, x.trials).clone(), x.trials)


@rule("relu")
def relu(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A ReLU right after a batch norm joins it, where that waits."""
    given = arguments_of("input inplace", {"inplace": False}, args, kwargs)
    joined = _join_norm(given["input"], 0.0, given["inplace"])
    return unary(function, args, kwargs) if joined is None else joined


@rule("leaky_relu")
def leaky_relu(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A leaky ReLU right after a batch norm joins it, where that waits."""
    defaults = {"negative_slope": 0.01, "inplace": False}
    given = arguments_of("input negative_slope inplace", defaults, args, kwargs)
    joined = _join_norm(given["input"], given["negative_slope"], given["inplace"])
    return unary(function, args, kwargs) if joined is None else joined


def _join_norm(x: TrialTensor, slope: float, in_place: bool) -> TrialTensor | None:
    """The norm that `x` waits for, cut by a slope; None where it waits for none, or was cut before.

    A slope below zero would turn the largest value of a norm into another one's.
    """
    pending = x.pending
    if pending is None or pending.slope != 1.0 or slope < 0.0:
        return None
    if in_place:
        x.pending = pending.with_slope(slope)
        return x
    return TrialTensor(pending.like, x.trials, pending.with_slope(slope))


@rule("prelu")
def prelu(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Each trial's own slopes below zero, one for all channels or one each."""
    x, weight = args
    trials = trials_of(args)
    dims = x.dim()
    slopes = unwrap(weight, trials)
    # Channels are the second axis of a batch; a lone axis has one slope.
    channels = (1,) * min(dims, 1) + (-1,) + (1,) * (dims - 2) if dims > 1 else (-1,) * dims
    slopes = slopes.reshape(trials.count, *channels)
    inner = unwrap(x, trials)
    return wrap(torch.where(inner > 0, inner, slopes * inner), trials)
