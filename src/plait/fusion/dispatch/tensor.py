"""A tensor that carries the trials axis, and looks to a module like one trial's tensor.

`stacked` has the trials first: (trials, *shape). Its strides are the memory layout, and rules choose it: a
convolution leaves the trials folded into the channels, a product leaves them outermost, and what follows
reads either without a copy where it can. Operations without a rule go through torch.func.vmap, or trial by
trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.registry import (
    READING_RULES,
    RULES,
    Arguments,
    Function,
    Options,
    Rule,
)
from plait.fusion.errors import FusionError, user_line
from plait.fusion.speed.lazy_norm import PendingNorm
from plait.fusion.trials.padding import Rows
from plait.fusion.trials.per_trial import PerTrial, on_device

# In the memo of a deep copy: the trial that is copied.
OF_TRIAL = "plait.fusion.trial"


class Trials:
    """What the tensors of one forward share: how many trials there are, their random streams and own rows."""

    def __init__(self, count: int, streams: Streams | None = None, rows: Rows | None = None) -> None:
        self.count = count
        self.streams = streams
        self.rows = rows
        # Whether the code that runs now is that of one trial, on plain tensors.
        self.is_alone = False


class LayoutError(RuntimeError):
    """A rule computed something that has no trials axis in front: the rule does not fit this call."""


class PastRulesError(FusionError):
    """Code of torch in C++ got a trial tensor as it is: it would compute with one that has no values."""


def _check_layout(inner: Tensor, trials: Trials) -> None:
    if isinstance(inner, TrialTensor) or inner.dim() == 0 or inner.shape[0] != trials.count:
        raise LayoutError(
            f"found a tensor of shape {tuple(inner.shape)}, expected the {trials.count} trials first"
        )


class TrialTensor(torch.Tensor):
    """One tensor for each trial, under the shape of one."""

    # Computes a call that is no mere reading; `call.py`, which knows this class and all rules, sets it.
    compute: ClassVar[Callable[[Rule | None, Function, Arguments, Options], Any]]
    trials: Trials
    pending: PendingNorm | None
    # Whether this is a view with its axes in another order, as a lone model's tensor then is too.
    turned: bool = False
    # On which axis the rows of a padded batch lie; None where it has none, or nobody knows.
    rows_at: int | None = None
    _stacked: Tensor | None

    @staticmethod
    def __new__(cls, inner: Tensor, trials: Trials, pending: PendingNorm | None = None) -> TrialTensor:
        """Around `inner`, trials first; with `pending`, around what that will be, of the shape of `inner`."""
        _check_layout(inner, trials)
        made: TrialTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape[1:], dtype=inner.dtype, device=inner.device
        )
        made._stacked = inner if pending is None else None
        made.pending = pending
        made.trials = trials
        return made

    @property
    def stacked(self) -> Tensor:
        """The tensors of all trials: (trials, *shape)."""
        if self._stacked is None:
            assert self.pending is not None
            self._stacked, self.pending = self.pending.outcome(), None
        if self._stacked.shape[0] != self.trials.count:
            raise FusionError(
                f"{user_line()}\n  uses a tensor kept from when the model had {self._stacked.shape[0]} "
                f"trials; now it has {self.trials.count}, so clear what the model keeps between forwards"
            )
        return self._stacked

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        rule = RULES.get(func)
        kwargs = kwargs or {}
        if rule is not None and rule in READING_RULES:
            return rule(func, args, kwargs)
        return cls.compute(rule, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # torch.arange(x) and its kind read the number in C++.
            return RULES[torch.Tensor.item](torch.Tensor.item, args, {})
        raise PastRulesError(
            f"{user_line()}\n  gives a tensor of the trials to {func}, past all rules",
            "name the module in fuse(..., unfused=[...]), or write the call another way",
        )

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        """One trial's tensor where the memo says of which trial a copy is made, else all, without history."""
        if id(self) not in memo:
            number = memo.get(OF_TRIAL)
            inner = self.stacked.detach()
            of_all = number is None
            memo[id(self)] = TrialTensor(inner.clone(), self.trials) if of_all else inner[number].clone()
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return TrialTensor, (self.stacked.detach(), self.trials)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TrialTensor(trials={self.trials.count}, shape={tuple(self.shape)})"


def trials_of(*values: Any) -> Trials:
    """What the first trial tensor among `values` shares with the others."""
    for value in leaves(values):
        if isinstance(value, TrialTensor):
            return value.trials
    raise AssertionError("a rule was called without a trial tensor")


def leaves(values: Any) -> Iterator[Any]:
    """The values within nested tuples, lists and dictionaries."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, dict):
        yield from leaves(tuple(values.values()))
    else:
        yield values


def wrap(outcome: Any, trials: Trials) -> Any:
    """`outcome` with its tensors, all of them trials first, as trial tensors."""
    if isinstance(outcome, Tensor):
        return TrialTensor(outcome, trials)
    if isinstance(outcome, (tuple, list)):
        return pytree.tree_map(lambda x: TrialTensor(x, trials) if isinstance(x, Tensor) else x, outcome)
    return outcome


def unwrap(value: Any, trials: Trials) -> Tensor:
    """`value` trials first: a trial tensor's own, a shared tensor or a number repeated without a copy."""
    if isinstance(value, TrialTensor):
        return value.stacked
    if isinstance(value, PerTrial):
        return on_device(value.values, torch.get_default_dtype(), torch.device("cpu"))
    shared = value if isinstance(value, Tensor) else torch.tensor(value)
    return shared.expand(trials.count, *shared.shape)
