"""The table of rules: which of our functions computes a torch function for all trials at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

Arguments = tuple[Any, ...]
Options = dict[str, Any]
Function = Callable[..., Any]
# Computes a torch call (function, args, kwargs), whose arguments contain trial tensors.
Rule = Callable[[Function, Arguments, Options], Any]

RULES: dict[Function, Rule] = {}

# Rules that support `PerTrial` arguments; others would use the first trial's value.
PER_TRIAL_RULES: set[Rule] = set()

# Rules that only read metadata; most calls of a forward use them.
READING_RULES: set[Rule] = set()

# One operation can be called as torch.relu, Tensor.relu or F.relu, which are different functions.
_NAMESPACES = (torch, torch.Tensor, F, torch._C._nn, torch.special)


def spellings(names: Iterable[str]) -> Iterator[Function]:
    """Every function of torch with one of `names`; names unknown to this version of torch are skipped."""
    for name in names:
        for namespace in _NAMESPACES:
            function = getattr(namespace, name, None)
            if callable(function):
                yield function


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: register the function as the rule for all spellings of `names`."""

    def register(function: Rule) -> Rule:
        for spelling in spellings(names):
            RULES[spelling] = function
        return function

    return register


def takes_per_trial(function: Rule) -> Rule:
    """Decorator: the rule supports `PerTrial` arguments."""
    PER_TRIAL_RULES.add(function)
    return function


def getter(name: str) -> Function:
    """The function that torch dispatches when a tensor's property `name` is read."""
    get: Function = vars(torch._C.TensorBase)[name].__get__
    return get


def arguments_of(names: str, defaults: Options, args: Arguments, kwargs: Options) -> Options:
    """The arguments of a call by name; `names` gives their order, `defaults` the optional ones."""
    return {**defaults, **dict(zip(_split(names), args)), **kwargs}


_split = cache(str.split)


# NumPy's names that torch accepts for its own.
_SYNONYMS = {"axis": "dim", "keepdims": "keepdim"}
# Functions with an argument that is really named `axis`, and those whose `input` is not the first argument.
_OWN_AXIS = ("quantize", "segment_reduce")
_INPUT_LATER = ("where", "searchsorted", "polygamma")


def usual_form(function: Function, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """The call with its first argument positional, and NumPy's option names replaced by torch's."""
    if args and "axis" not in kwargs and "keepdims" not in kwargs:
        return args, kwargs
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
