"""Fallbacks for torch functions without a rule: their Python body, vmap, or a loop over the trials."""

from __future__ import annotations

import random
import types
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from plait.fusion.dispatch.one_trial import one_trial, stack_outcomes
from plait.fusion.dispatch.padding import Rows
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.refusals import (
    as_strided,
    name_of,
    no_fused_form,
    refuse_random,
    refuse_reshaping,
    refuse_shared_target,
    refuse_values,
)
from plait.fusion.dispatch.registry import (
    READING_RULES,
    RULES,
    Arguments,
    Function,
    Options,
    Rule,
    rule,
    takes_per_trial,
)
from plait.fusion.dispatch.tensor import LayoutError, PastRulesError, TrialTensor, leaves, trials_of, wrap
from plait.fusion.errors import FusionError

_METADATA = (
    "size dim numel nelement ndimension is_floating_point is_complex is_signed element_size get_device "
    "is_contiguous storage_offset __len__ is_inference is_conj is_neg __hash__"
)
# Functions whose names look like those that write.
_READING = ("__int__", "__index__", "__invert__")


def find_rule(function: Function) -> Rule:
    """Choose a rule for a function that is not in the table, and add it to the table."""
    if getattr(function, "__name__", "") == "__get__":
        return metadata
    if isinstance(function, types.FunctionType) and (function.__module__ or "").startswith("torch."):
        return descend
    return vmap_rule


@rule(*_METADATA.split())
def metadata(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Metadata of the wrapper: shape, dtype, device."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


READING_RULES.add(metadata)


@takes_per_trial
def descend(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Run torch's Python implementation of `function` on trial tensors; its operations have rules."""
    if function in _descending:
        raise RecursionError(f"{name_of(function)} calls itself")
    _descending.append(function)
    try:
        with without_draws(function):
            return body_of(function)(*args, **kwargs)
    finally:
        _descending.pop()


# The functions whose bodies are running, outermost first; models run in one thread.
_descending: list[Function] = []


def recover(rule: Rule, function: Function, args: Arguments, kwargs: Options, failure: Exception) -> Any:
    """Compute trial by trial what a failed rule should have; or raise torch's error about one trial."""
    final = isinstance(failure, FusionError) and not isinstance(failure, PastRulesError)
    # The last is how torch ends a recomputation early.
    if final or isinstance(failure, (torch.OutOfMemoryError, _StopRecomputationError)):
        raise failure
    if rule in _FINAL:
        raise no_fused_form(function, failure) from failure
    try:
        return _loop_anyhow(function, args, kwargs)
    except FusionError:
        raise
    except Exception as lone_failure:
        if isinstance(lone_failure, (AssertionError, RecursionError, LayoutError)):
            raise no_fused_form(function, failure) from failure
        # The call is also wrong for a plain tensor, and torch says why.
        raise lone_failure from None


def _loop_anyhow(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Trial by trial; on contiguous copies of the slices if that fails."""
    try:
        return loop(function, args, kwargs)
    except FusionError:
        raise
    except Exception as failure:
        flat = pytree.tree_map(_trials_outermost, (args, kwargs))
        if is_in_place(function) or all(a is b for a, b in zip(leaves((args, kwargs)), leaves(flat))):
            raise
        try:
            return loop(function, *flat)
        except FusionError:
            raise
        except Exception:
            raise failure from None


@rule("max_unpool1d", "max_unpool2d", "max_unpool3d")
def loop_contiguous(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Trial by trial on contiguous slices, which some backward functions of torch need."""
    return loop(function, *pytree.tree_map(_trials_outermost, (args, kwargs)))


def _trials_outermost(value: Any) -> Any:
    if not isinstance(value, TrialTensor) or value.stacked.is_contiguous():
        return value
    return TrialTensor(value.stacked.contiguous(), value.trials)


class without_draws:
    """Raises if `function` draws from torch's generators, which all trials share."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __enter__(self) -> None:
        self.before = draw_marks()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None and self.before != draw_marks():
            refuse_random(self.function, (), {})


def draw_marks() -> tuple[Any, ...]:
    """A value that changes with each draw from torch's generators."""
    with torch._C._DisableTorchDispatch():
        marks: tuple[Any, ...] = (torch.default_generator.get_state().numpy().tobytes(),)
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        marks += (torch.cuda.default_generators[torch.cuda.current_device()].get_offset(),)
    return marks


def python_marks() -> tuple[Any, ...]:
    """A value that changes with each draw from Python's generators and NumPy's global one."""
    state: Any = numpy.random.get_state(legacy=False)
    numbers = [x.tobytes() if isinstance(x, numpy.ndarray) else x for x in state["state"].values()]
    # Of normal numbers the second of two is kept, and its draw changes nothing else.
    return random.getstate(), numbers, state.get("has_gauss")


@cache
def body_of(function: types.FunctionType) -> types.FunctionType:
    """`function` without its `__torch_function__` check, which led here."""
    never = {
        name: lambda *tensors: False
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    body = types.FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


@takes_per_trial
def vmap_rule(function: Function, args: Arguments, kwargs: Options) -> Any:
    """The function under torch.func.vmap; if vmap fails, trial by trial from then on."""
    if is_in_place(function):
        return _in_place(function, args, kwargs)
    if any(isinstance(leaf, PerTrial) for leaf in leaves((args, kwargs))):
        return loop(function, args, kwargs)
    try:
        return _vmapped(function, args, kwargs)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as failure:
        if "random operation" in str(failure):
            return refuse_random(function, args, kwargs)
        # An invalid call fails here too, with torch's own message about one trial.
        outcome = loop(function, args, kwargs)
        RULES[function] = loop
        return outcome


def _in_place(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Compute an in-place function by its out-of-place version, and write the result."""
    refuse_shared_target(function, args)
    lasting = getattr(torch.Tensor, name_of(function).removesuffix("_"), None)
    if lasting is None or name_of(function).startswith("__"):
        return loop(function, args, kwargs)
    # On a copy, as autograd may save it and it is written below.
    outcome = lasting(args[0].clone(), *args[1:], **kwargs)
    if outcome.shape != args[0].shape or outcome.dtype != args[0].dtype:
        return loop(function, args, kwargs)
    args[0].stacked.copy_(outcome.stacked)
    return args[0]


def _vmapped(function: Function, args: Arguments, kwargs: Options) -> Any:
    trials = trials_of(args, kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(flat) if isinstance(leaf, TrialTensor)]

    def call(*inner: Tensor) -> Any:
        values = list(flat)
        for index, tensor in zip(indices, inner):
            values[index] = tensor
        some_args, some_kwargs = pytree.tree_unflatten(values, spec)
        return function(*some_args, **some_kwargs)

    return wrap(torch.func.vmap(call, randomness="error")(*(flat[i].stacked for i in indices)), trials)


def loop(function: Function, args: Arguments, kwargs: Options, rows: Rows | None = None) -> Any:
    """The function for one trial after another, results stacked; with `rows`, without padding rows."""
    trials = trials_of(args, kwargs)
    with without_draws(function):
        calls = [one_trial((args, kwargs), trial, rows) for trial in range(trials.count)]
        if is_in_place(function):
            return _loop_in_place(function, args, calls)
        outcomes = [function(*own_args, **own_kwargs) for own_args, own_kwargs in calls]
    if any(isinstance(leaf, TrialTensor) for leaf in leaves(outcomes)):
        refuse_random(function, args, kwargs)
    return stack_outcomes(outcomes, trials)


def _loop_in_place(function: Function, args: Arguments, calls: list[Any]) -> Any:
    """The function on a copy of each trial's tensor; all are written back at once.

    Separate writes would each increase the common version counter, and autograd would reject what it saved
    for the first trial after the write of the second.
    """
    refuse_shared_target(function, args)
    copies = []
    for (target, *others), kwargs in calls:
        copies.append(target.clone())
        function(copies[-1], *others, **kwargs)
    if any(made.shape != args[0].shape for made in copies):
        refuse_reshaping(function, args, {})
    args[0].stacked.copy_(torch.stack(copies))
    return args[0]


def is_in_place(function: Function) -> bool:
    """Whether `function` writes to its first argument, by torch's naming convention."""
    name = getattr(function, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _READING)
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_")


@cache
def may_write(function: Function) -> bool:
    """Whether `function` writes to its first argument, or does if it is told so by `inplace`."""
    code = getattr(function, "__code__", None)
    return is_in_place(function) or (code is not None and "inplace" in code.co_varnames)


def strides(function: Function, args: Arguments, kwargs: Options) -> Any:
    """The strides: actual ones for a single trial, contiguous ones for several."""
    x = args[0]
    if x.trials.count > 1:
        return metadata(function, args, kwargs)
    return x.stacked[0].stride(*args[1:], **kwargs)


def formatted(function: Function, args: Arguments, kwargs: Options) -> str:
    """A value formatted as text: that of each trial."""
    texts = [format(x, *args[1:]) for x in args[0].stacked.detach().unbind()]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


RULES[torch.Tensor.stride] = strides
RULES[torch.Tensor.__format__] = formatted
# Under vmap the gradient of one is wrong, and that of the other is missing (torch 2.13).
rule("select_scatter", "addr", "addr_")(loop)
# Rules that compute nothing, or are the last resort.
_FINAL = frozenset((loop, metadata, refuse_values, refuse_random, refuse_reshaping, as_strided, strides))
