"""The table of rules: which of our functions computes a torch function for all trials at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Arguments = tuple[Any, ...]
Options = dict[str, Any]
Function = Callable[..., Any]
# What the model called, with the arguments of that call, trial tensors among them.
Rule = Callable[[Function, Arguments, Options], Any]

RULES: dict[Function, Rule] = {}

# Rules that compute with a hyperparameter's value of each trial; the others would see the first one's.
PER_TRIAL_RULES: set[Rule] = set()

# Rules that read what a tensor is, and compute nothing: most calls of a forward are theirs.
READING_RULES: set[Rule] = set()

# One operation is reached as torch.relu, Tensor.relu, F.relu; each is a function of its own to torch.
_PLACES = (torch, torch.Tensor, F, torch._C._nn, torch.special)


def spellings(names: Iterable[str]) -> Iterator[Function]:
    """Every function of torch called one of `names`; a name that this torch has not is left out."""
    for name in names:
        for place in _PLACES:
            function = getattr(place, name, None)
            if callable(function):
                yield function


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule for all spellings of `names`."""

    def register(function: Rule) -> Rule:
        for spelling in spellings(names):
            RULES[spelling] = function
        return function

    return register


def takes_per_trial(function: Rule) -> Rule:
    """Say that a rule knows what to do with `PerTrial` among its arguments."""
    PER_TRIAL_RULES.add(function)
    return function


def getter(name: str) -> Function:
    """What torch calls when a tensor's property `name` is read."""
    found: Function = vars(torch._C.TensorBase)[name].__get__
    return found


def arguments_of(names: str, defaults: Options, args: Arguments, kwargs: Options) -> Options:
    """The arguments of a call by name; `names` says their order, `defaults` those that may be left out."""
    return {**defaults, **dict(zip(names.split(), args)), **kwargs}


# Names that torch takes from NumPy for its own.
_SYNONYMS = {"axis": "dim", "keepdims": "keepdim"}
# Functions that have an axis of that very name, and those whose `input` is not the first argument.
_OWN_AXIS = ("quantize", "segment_reduce")
_INPUT_LATER = ("where", "searchsorted", "polygamma")


def usual_form(function: Function, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """The call with its first argument by position, and NumPy's names of options replaced by torch's."""
    name = getattr(function, "__name__", "")
    code = getattr(function, "__code__", None)
    if not any(word in name for word in _OWN_AXIS) and (code is None or "axis" not in code.co_varnames):
        kwargs = {_SYNONYMS.get(key, key): value for key, value in kwargs.items()}
    if args or name in _INPUT_LATER:
        return args, kwargs
    first = "input" if code is None else code.co_varnames[0] if code.co_varnames else ""
    if first in kwargs:
        args = (kwargs[first],)
        kwargs = {key: value for key, value in kwargs.items() if key != first}
    return args, kwargs
