"""Calls that have no meaning for fused trials, or one only if all trials agree; the errors say what to do."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.one_trial import call_alone
from plait.fusion.dispatch.registry import Arguments, Function, Options, rule
from plait.fusion.dispatch.tensor import TrialTensor, trials_of, wrap
from plait.fusion.errors import FusionError, user_line

# Functions that return values to Python, which can take only one branch.
_VALUES = (
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__ is_nonzero equal "
    "__dlpack__ allclose nonzero argwhere unique unique_consecutive masked_select bincount __contains__"
)
# Those among them that return one value: allowed if all trials have the same.
_SCALARS = "item __bool__ __int__ __float__ __index__ is_nonzero equal allclose __contains__"
_RESHAPING = "transpose_ t_ squeeze_ unsqueeze_ resize_ resize_as_ swapaxes_ swapdims_ set_"
_STREAMED = "rand, randn, normal, randint, randperm, bernoulli, multinomial, exponential_, dropout"
_INSTEAD = f"use one of which each trial has its own stream ({_STREAMED})"
RANDOM = "rrelu rrelu_ geometric_ cauchy_ log_normal_ poisson random_"


def refuse_outside(function: Function) -> NoReturn:
    """Raise FusionError for a trial tensor used outside of a fused module's call."""
    raise FusionError(
        f"{user_line()}\n  calls {name_of(function)} on a tensor that a fused model kept, after its call has "
        f"ended, where other tensors have the trials axis first",
        "return it from the model, or compute with it in fused.map(function, ...)",
    )


def refuse_out() -> NoReturn:
    """Raise FusionError for `out=`: one tensor of the user's cannot hold what differs between trials."""
    raise FusionError(
        f"{user_line()}\n  writes to out=..., which fused models do not support; use the returned tensor"
    )


def refuse_transformed(function: Function) -> NoReturn:
    """Raise FusionError inside transforms of torch.func: they would differentiate the sum over trials."""
    raise FusionError(
        f"{user_line()}\n  calls {name_of(function)} on tensors of the trials within a transform of "
        f"torch.func (grad, vjp, jvp, jacrev, vmap, ...), which does not support trials",
        "name the module in fuse(..., unfused=[...]), or use torch.autograd.grad",
    )


def refuse_compiled() -> NoReturn:
    """Raise FusionError for torch.compile, which would break the graph at each operation on trial tensors."""
    raise FusionError(
        "fused module: torch.compile cannot trace it in one graph; capture the step as a CUDA graph "
        "(plait.fusion.CapturedStep), or do not compile; torch.compiler.disable(fused) runs as it is in a "
        "function that is compiled"
    )


def check_eager() -> None:
    """Refuse transforms, frames that torch.compile traces, and those that it then runs as they are."""
    if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
        refuse_compiled()
    if peek_interpreter_stack() is not None:
        raise FusionError(
            "fused module: called within a transform of torch.func (grad, vjp, jvp, jacrev, vmap, ...), "
            "which does not support trials; use torch.autograd.grad"
        )
    if torch._C._get_tracing_state() is not None:
        raise FusionError("fused module: torch.jit.trace does not support trials; trace one: fused.trial(0)")


def refuse_passed_by(*_: Any, **__: Any) -> NoReturn:
    """Raise FusionError for a hook on a tensor past which the next operation was computed."""
    raise FusionError(
        f"{user_line()}\n  asks for the gradient of a tensor after it was used, together with which the next "
        f"operation was computed; clone it before it is used (y = layer(x).clone())"
    )


def no_fused_form(function: Function, failure: Exception) -> FusionError:
    message = " ".join(str(failure).split())
    return FusionError(
        f"{user_line()}\n  calls {name_of(function)} in a way that has no fused form ({message[:160]})",
        "name the module in fuse(..., unfused=[...]), or write the call another way",
    )


def name_of(function: Function) -> str:
    return getattr(function, "__name__", str(function))


class SharedTargetError(FusionError):
    """Values that differ between trials would be written to a tensor that they share."""


def refuse_shared_target(function: Function, args: Arguments) -> None:
    """Raise SharedTargetError if the first argument, which is written to, is a plain tensor."""
    if not isinstance(args[0], TrialTensor):
        raise SharedTargetError(
            f"{user_line()}\n  writes what differs between trials into a tensor that all trials share; make "
            f"that tensor from one of the model's own (x.new_zeros(...), torch.zeros_like(x)), or write it "
            f"without the in-place operation"
        )


# Here transformers asks only whether a mask is all ones, to do without it; with it every trial is right.
_ASKS_FOR_WHOLE_MASKS = "transformers/masking_utils.py"


@rule(*_VALUES.split())
def refuse_values(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Allow Python to read a value if all trials have the same; raise FusionError otherwise."""
    trials = trials_of(args, kwargs)
    name = name_of(function)
    if trials.count == 1:
        outcome = call_alone(function, args, kwargs, 0)
        return pytree.tree_map_only(Tensor, lambda x: wrap(x.unsqueeze(0), trials), outcome)
    if name in _SCALARS.split():
        answers = [call_alone(function, args, kwargs, trial) for trial in range(trials.count)]
        if all(answer == answers[0] for answer in answers):
            # Every trial takes the same branch.
            return answers[0]
        if name == "__bool__" and user_line().partition(":")[0].endswith(_ASKS_FOR_WHOLE_MASKS):
            return False
    raise FusionError(
        f"{user_line()}\n  reads a tensor's value in Python ({name}), and {trials.count} trials have "
        f"{trials.count} values",
        "name the module in fuse(..., unfused=[...]) to run it trial by trial",
    )


@rule(*RANDOM.split())
def refuse_random(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Raise FusionError for a draw from torch's generator, which all trials share."""
    name = name_of(function)
    advice = _INSTEAD
    if name.removesuffix("_") in [streamed.removesuffix("_") for streamed in _STREAMED.split(", ")]:
        advice = "draw into a new tensor, without out= or a generator, so that each trial uses its own stream"
    raise FusionError(
        f"{user_line()}\n  draws from torch's generator ({name}), which all trials share; {advice}"
    )


def refuse_hidden_draws() -> NoReturn:
    """Raise FusionError after a forward in which torch's generator was used where no call could be seen."""
    raise FusionError(
        f"the forward, or a function given to map, draws from torch's generator within another function "
        f"(such as torch.distributions.Beta or nn.init), which all trials share; {_INSTEAD}",
        "name the module in fuse(..., unfused=[...])",
    )


@rule(*_RESHAPING.split())
def refuse_reshaping(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Raise FusionError, as a trial tensor's shape cannot change in place."""
    name = name_of(function)
    raise FusionError(f"{user_line()}\n  changes a shape in place ({name}); use {name.removesuffix('_')}")


@rule("as_strided", "as_strided_copy", "as_strided_scatter", "as_strided_")
def as_strided(function: Function, args: Arguments, kwargs: Options) -> Any:
    """Raw memory access: allowed for a single trial only, as the trials' memory is interleaved."""
    x = args[0]
    alone = isinstance(x, TrialTensor) and x.trials.count == 1 and x.stacked.storage_offset() == 0
    if not alone or not function.__name__.startswith("as_strided") or "scatter" in function.__name__:
        raise FusionError(
            f"{user_line()}\n  reads memory beyond a tensor's shape (as_strided), possibly of other trials; "
            f"use unfold, narrow or index_select, or name the module in fuse(..., unfused=[...])"
        )
    given = {**dict(zip(("size", "stride", "storage_offset"), args[1:])), **kwargs}
    return TrialTensor(function(x.stacked[0], **given).unsqueeze(0), x.trials)
