"""Elementwise functions: operands are broadcast after the trials axis, then torch's function is called."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch import alias_links
from plait.fusion.dispatch.fallback import is_in_place, loop
from plait.fusion.dispatch.per_trial import PerTrial, on_device
from plait.fusion.dispatch.refusals import refuse_shared_target, refuse_values
from plait.fusion.dispatch.registry import (
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
from plait.fusion.dispatch.tensor import TrialTensor, trials_of, unwrap, wrap
from plait.fusion.kernels import Slope
from plait.fusion.speed.lazy_activation import PendingActivation
from plait.fusion.speed.lazy_cast import pending_cast
from plait.fusion.speed.lazy_rows import PendingDense, pending_sum

_UNARY = (
    "abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil conj conj_physical cos cosh "
    "deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 isfinite isinf isnan isneginf isposinf "
    "isreal lgamma log log10 log1p log2 logical_not logit nan_to_num neg negative positive rad2deg "
    "reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc __neg__ "
    "__pos__ __invert__ __abs__ relu6 elu selu celu mish softplus softsign tanhshrink hardtanh hardsigmoid "
    "logsigmoid log_sigmoid threshold hardshrink softshrink clone detach double half bfloat16 int long bool "
    "cpu cuda requires_grad_ zero_ zeros_like ones_like empty_like real imag clamp clamp_min clamp_max clip "
    "xlogy entr relu_ relu6_ elu_ selu_ celu_ leaky_relu_ hardtanh_ threshold_ sigmoid_ tanh_ exp_ sqrt_ "
    "neg_ abs_ clamp_ clamp_min_ clamp_max_ reciprocal_ floor_ round_ log_ square_ rsqrt_ cos_ sin_"
)
_SEVERAL = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power "
    "maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge greater greater_equal less less_equal not_equal "
    "isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor copysign lerp addcmul "
    "addcdiv rsub logaddexp logaddexp2 heaviside nextafter __add__ __radd__ __sub__ __rsub__ __mul__ "
    "__rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ "
    "__rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ "
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__ add_ sub_ mul_ div_ "
    "pow_ copy_ lerp_ addcmul_ addcdiv_ subtract_ multiply_ divide_ fmod_ remainder_ logical_and_ "
    "logical_or_ logical_not_"
)


_ADDS = frozenset(spellings(("add", "__add__", "__radd__")))
# Numbers of these types need no alignment with a tensor; a `PerTrial` has another type.
_NUMBERS = frozenset((int, float, bool))


@rule(*_UNARY.split())
def unary(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A function of one tensor, applied to the stacked tensor."""
    x, others = args[0], args[1:]
    several = (others or kwargs) and any(isinstance(v, TrialTensor) for v in (*others, *kwargs.values()))
    if several or not isinstance(x, TrialTensor):
        return elementwise(function, args, kwargs)
    inner = x.stacked
    outcome = function(inner, *others, **kwargs)
    return x if outcome is inner else TrialTensor(outcome, x.trials)


@rule("detach_")
def detach_in_place(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Also where the tensor of all trials is a view, which torch does not detach in place."""
    x = args[0]
    if x.stacked.is_leaf:
        return unary(function, args, kwargs)
    x.resolve(x.stacked.detach())
    return x


@takes_per_trial
@rule(*_SEVERAL.split())
def elementwise(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A function of several tensors that broadcast after the trials axis."""
    if len(args) == 2 and not kwargs and type(x := args[0]) is TrialTensor:  # most calls
        other = args[1]
        fits = type(other) in _NUMBERS
        if type(other) is TrialTensor:
            waits = (x.pending is not None or other.pending is not None) and function in _ADDS
            if waits and (pending := pending_sum(x, other)) is not None:
                return TrialTensor(pending.like, x.trials, pending)
            fits = x.dim() == other.dim()
        if fits:  # nothing to align
            one = x.stacked
            outcome = function(one, other.stacked if type(other) is TrialTensor else other)
            return x if outcome is one else TrialTensor(outcome, x.trials)
    if type(args[0]) is TrialTensor and not kwargs and all(type(value) in _NUMBERS for value in args[1:]):
        return unary(function, args, kwargs)
    trials = trials_of(*args) if not kwargs else trials_of(args, kwargs)
    in_place = is_in_place(function)
    if in_place:
        refuse_shared_target(function, args)
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    dims = max(operand.dim() for operand in operands)
    if in_place and args[0].dim() < dims:
        # The target cannot be broadcast; torch raises the error for one trial.
        return loop(function, args, kwargs)
    like = next(operand for operand in operands if isinstance(operand, TrialTensor))
    scalars = _scalar_type(operands[1:] if function.__name__ == "where" else operands)
    placed = [align_operand(value, dims, like, scalars) for value in args]
    named = {name: align_operand(value, dims, like, scalars) for name, value in kwargs.items()}
    outcome = function(*placed, **named)
    return args[0] if in_place else wrap(outcome, trials)


def _scalar_type(operands: list[Tensor]) -> torch.dtype | None:
    """The dtype to which 0-dim tensors are cast; None if they keep their own.

    By type promotion a 0-dim tensor changes the dtype of a result only if it is of a higher category. With
    the trials axis it would no longer be 0-dim.
    """
    have_axes = [operand.dim() > 0 for operand in operands]
    if all(have_axes) or not any(have_axes):
        return None
    wide, scalar = (
        functools.reduce(torch.promote_types, [x.dtype for x, has in zip(operands, have_axes) if has is axes])
        for axes in (True, False)
    )
    return wide if _rank(scalar) <= _rank(wide) else scalar


def _rank(kind: torch.dtype) -> int:
    """The category of a dtype for type promotion: bool, integer, float, complex."""
    if kind.is_complex:
        return 3
    return 2 if kind.is_floating_point else int(kind != torch.bool)


def align_operand(value: Any, dims: int, like: TrialTensor, scalars: torch.dtype | None = None) -> Any:
    """`value` as an operand for all trials: (trials, 1..., *shape), with `dims` axes after the trials.

    A 0-dim tensor is cast to `scalars`, if given.
    """
    if isinstance(value, PerTrial):
        # As in type promotion with Python numbers, use the tensor's dtype.
        kind = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return on_device(value.values, kind, like.device).view(-1, *(1,) * dims)
    if not isinstance(value, TrialTensor):
        # With 0-dim tensors of the trials, a shared 0-dim tensor must not be treated as a number.
        return value.view(1) if dims == 0 and isinstance(value, Tensor) and value.dim() == 0 else value
    inner = value.stacked
    axes = inner.dim() - 1
    if axes == dims:
        return inner
    if axes == 0 and scalars is not None:
        inner = inner.to(scalars)
    return inner.reshape(inner.shape[0], *(1,) * (dims - axes), *inner.shape[1:])


@rule("to", "type", "type_as")
def cast(function: Function, args: Arguments, kwargs: Options) -> Any:
    """`x.to(...)`, `x.type_as(y)`, `x.type()`; if only `y` has trials, only its dtype and device are used."""
    x = args[0]
    if not isinstance(x, TrialTensor):
        others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, TrialTensor)]
        kind, device = others[0].stacked.dtype, others[0].stacked.device
        rest = {k: v for k, v in kwargs.items() if not isinstance(v, TrialTensor)}
        flags = [value for value in args[1:] if not isinstance(value, TrialTensor)]
        return x.to(device, kind, *flags, **rest)
    if function.__name__ == "type" and len(args) == 1 and not kwargs:
        return x.stacked.type()
    args = tuple(v.stacked[0] if isinstance(v, TrialTensor) else v for v in args[1:])
    kwargs = {k: v.stacked[0] if isinstance(v, TrialTensor) else v for k, v in kwargs.items()}
    outcome = function(x.stacked, *args, **_without_layout(kwargs))
    return x if outcome is x.stacked else TrialTensor(outcome, x.trials)


def _without_layout(kwargs: Options) -> Options:
    """Without `memory_format`: rules choose the layout of trial tensors."""
    return {k: v for k, v in kwargs.items() if k != "memory_format"}


@rule("float")
def to_float(function: Function, args: Arguments, kwargs: Options) -> Any:
    """`x.float()`, which a loss may do without."""
    x = args[0]
    pending = None if kwargs or x.pending is not None else pending_cast(x.stacked)
    return unary(function, args, kwargs) if pending is None else TrialTensor(pending.like, x.trials, pending)


@rule("contiguous")
def contiguous(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A contiguous tensor; in a single model it is usually the tensor itself."""
    x = args[0]
    outcome = x.stacked.contiguous()
    if outcome is x.stacked:
        return x
    made = TrialTensor(outcome, x.trials)
    link_copy(x, made, surely=False)
    return made


def link_copy(x: TrialTensor, made: TrialTensor, surely: bool) -> None:
    """Link `made` to `x` if it is a copy: in a single model both may share memory.

    `surely`: they do; otherwise it depends on the memory layout.
    """
    # A view is no copy. In inference mode there are none, and only the storages tell.
    # `reshape` copies what is permuted; `view` never does.
    if (
        (x.permuted and not surely)
        or made.stacked._is_view()
        or x.stacked.untyped_storage() is made.stacked.untyped_storage()
    ):
        return
    alias_links.link(x.stacked, made.stacked, surely or alias_links.is_view_alone(x.stacked))


@rule("where")
def where(function: Function, args: Arguments, kwargs: Options) -> Any:
    """torch.where; with only a condition it returns indices, whose number differs by trial."""
    one_argument = len(args) + len(kwargs) == 1
    return (refuse_values if one_argument else elementwise)(function, args, kwargs)


@rule("masked_fill", "masked_fill_", "fill_", "full_like")
def fill(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Fill with a value; a value per trial is broadcast, which torch's functions do not support."""
    masks = function.__name__.startswith("masked")
    given = arguments_of("input mask value" if masks else "input value", {}, args, kwargs)
    if isinstance(given.get("value", given.get("fill_value")), TrialTensor):
        if is_in_place(function):
            refuse_shared_target(function, args)
        return loop(function, args, kwargs)
    return (elementwise if masks else unary)(function, args, _without_layout(kwargs))


RULES[getter("real")] = lambda f, args, kwargs: TrialTensor(args[0].stacked.real, args[0].trials)
RULES[getter("imag")] = lambda f, args, kwargs: TrialTensor(args[0].stacked.imag, args[0].trials)
RULES[getter("_version")] = lambda f, args, kwargs: args[0].stacked._version
RULES[getter("data")] = lambda f, args, kwargs: TrialTensor(args[0].stacked.data, args[0].trials)
# Autograd state belongs to the inner tensor.
RULES[getter("requires_grad")] = lambda f, args, kwargs: args[0].stacked.requires_grad
RULES[getter("is_leaf")] = lambda f, args, kwargs: args[0].stacked.is_leaf
RULES[getter("grad_fn")] = lambda f, args, kwargs: args[0].stacked.grad_fn


@rule("new", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def new(function: Function, args: Arguments, kwargs: Options) -> Any:
    """`x.new_zeros(...)` and similar: one tensor per trial, since the model may write to it."""
    x = args[0]
    shared = function(x.stacked, *args[1:], **kwargs)
    return TrialTensor(unwrap(shared, x.trials).clone(), x.trials)


@rule("relu")
def relu(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A ReLU directly after a pending norm, convolution or dense layer is fused with it."""
    if args[0].pending is None:
        return unary(function, args, kwargs)
    given = arguments_of("input inplace", {"inplace": False}, args, kwargs)
    joined = _join_slope(given["input"], 0.0, given["inplace"])
    joined = _join_dense("relu", given) if joined is None else joined
    return unary(function, args, kwargs) if joined is None else joined


@rule("silu", "hardswish", "gelu")
def smooth(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A smooth activation directly after a pending norm or dense layer is fused with it, if one can be."""
    if args[0].pending is None:
        return unary(function, args, kwargs)
    if (name := function.__name__) != "gelu":
        given = arguments_of("input inplace", {"inplace": False}, args, kwargs)
        joined = _join_slope(given["input"], name, given["inplace"])
        joined = _join_dense(name, given) if joined is None and name == "silu" else joined
    else:
        given = arguments_of("input approximate", {"approximate": "none"}, args, kwargs)
        kind = {"none": "gelu", "tanh": "gelu tanh"}.get(given["approximate"])
        joined = None if kind is None else _join_dense(kind, {"inplace": False, **given})
    return unary(function, args, kwargs) if joined is None else joined


def _join_dense(kind: str, given: Options) -> TrialTensor | None:
    """The activation of a pending dense layer; None if there is none, or its bias cannot wait for it."""
    x = given["input"]
    ready = isinstance(x.pending, PendingDense) and x.pending.product.is_contiguous()
    if not ready or not torch.is_grad_enabled():
        return None
    outcome = x.pending.activated(kind)
    if not given["inplace"]:
        x.is_passed_by = True
        return TrialTensor(outcome, x.trials)
    x.resolve(outcome)
    made: TrialTensor = x
    return made


@rule("leaky_relu")
def leaky_relu(function: Function, args: Arguments, kwargs: Options) -> Any:
    """A leaky ReLU directly after a pending norm or convolution is fused with it."""
    if args[0].pending is None:
        return unary(function, args, kwargs)
    defaults = {"negative_slope": 0.01, "inplace": False}
    given = arguments_of("input negative_slope inplace", defaults, args, kwargs)
    joined = _join_slope(given["input"], given["negative_slope"], given["inplace"])
    return unary(function, args, kwargs) if joined is None else joined


def _join_slope(x: TrialTensor, slope: Slope, in_place: bool) -> TrialTensor | None:
    """What is pending of `x` with an activation of this slope; None if nothing is that can be joined."""
    joined = x.pending.with_slope(slope) if isinstance(x.pending, PendingActivation) else None
    if joined is None:
        return None
    if in_place:
        x.pending = joined
        return x
    x.is_passed_by = True
    return TrialTensor(joined.like, x.trials, joined)


@rule("prelu")
def prelu(function: Function, args: Arguments, kwargs: Options) -> Any:
    """PReLU with slopes per trial, one for all channels or one per channel."""
    given = arguments_of("input weight", {}, args, kwargs)
    x, weight = given["input"], given["weight"]
    trials = trials_of(x, weight)
    dims = x.dim()
    slopes = unwrap(weight, trials)
    # Channels are the second axis of a batch; a 1-dim tensor has one slope.
    channels = (1,) * min(dims, 1) + (-1,) + (1,) * (dims - 2) if dims > 1 else (-1,) * dims
    slopes = slopes.reshape(trials.count, *channels)
    inner = unwrap(x, trials)
    return wrap(torch.where(inner > 0, inner, slopes * inner), trials)
