"""A tensor with a trials axis that looks to a module like the tensor of one trial.

`stacked` has shape (trials, *shape). Rules choose its memory layout: a convolution folds the trials into the
channels, a matrix product keeps them outermost, and later operations read either without a copy if possible.
Operations without a rule use torch.func.vmap, or a loop over the trials.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.padding import Rows
from plait.fusion.dispatch.per_trial import PerTrial, on_device
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.registry import READING_RULES, RULES, Arguments, Function, Options, Rule
from plait.fusion.errors import FusionError, user_line

# Key in the memo of a deep copy: the trial that is copied.
OF_TRIAL = "plait.fusion.trial"


class PendingValue(Protocol):
    """What is computed when it is known what for; `like` has the shape of the outcome, trials first."""

    @property
    def like(self) -> Tensor: ...
    def outcome(self) -> Tensor: ...


class Trials:
    """State shared by the tensors of one forward: number of trials, random streams, padding."""

    def __init__(self, count: int, streams: Streams | None = None) -> None:
        self.count = count
        self.streams = streams
        # The real rows of a padded batch.
        self.rows: Rows | None = None
        # Whether the running code is that of a single trial, on plain tensors.
        self.is_alone = False
        # The `speed.tied_rows.Tables` of this forward, if rows of large ones were looked up.
        self.tables: Any = None
        # The tensors of this forward that were made pending.
        self._made_pending: list[weakref.ref[TrialTensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: without what belongs to the graph of a forward."""
        return {**vars(self), "tables": None, "_made_pending": []}

    def note_pending(self, tensor: TrialTensor) -> None:
        self._made_pending.append(weakref.ref(tensor))

    def compute_pending(self) -> None:
        """Compute the tensors that are still pending and may be used later, when the weights are others."""
        noted, self._made_pending = self._made_pending, []
        for each in reversed(noted):  # a norm together with the sum before it
            if (tensor := each()) is not None:
                tensor.stacked  # noqa: B018  (computes it)


class LayoutError(RuntimeError):
    """A rule returned a tensor without the trials axis first: the rule does not support this call."""


class PastRulesError(FusionError):
    """C++ code of torch received a trial tensor, which holds no data itself."""


def as_outside_of_inference() -> AbstractContextManager[Any]:
    """Context without inference mode, for what was called before that and may be used after it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class TrialTensor(torch.Tensor):
    """One tensor for each trial, under the shape of one."""

    # Computes a call that does not only read metadata; set by `call.py`, which imports this class and all
    # rules.
    compute: ClassVar[Callable[[Rule | None, Function, Arguments, Options], Any]]
    trials: Trials
    pending: PendingValue | None
    # Whether this is a view with permuted axes, as it then is in a single model.
    permuted: bool = False
    # Whether something was computed from what was pending: its gradient does not pass through this tensor.
    is_passed_by: bool = False
    # The axis with the rows of a padded batch; None if it has none, or it is unknown.
    rows_at: int | None = None
    _stacked: Tensor | None

    @staticmethod
    def __new__(cls, inner: Tensor, trials: Trials, pending: PendingValue | None = None) -> TrialTensor:
        """Wrap `inner`, trials first, or the future result of `pending`, which has the shape of `inner`."""
        shape = inner.shape
        if type(inner) is TrialTensor or not shape or shape[0] != trials.count:
            raise LayoutError(
                f"found a tensor of shape {tuple(shape)}, expected the {trials.count} trials first"
            )
        made: TrialTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape[1:], dtype=inner.dtype, device=inner.device
        )
        made._stacked = inner if pending is None else None
        made.pending = pending
        made.trials = trials
        if pending is not None:
            trials.note_pending(made)
        return made

    @property
    def stacked(self) -> Tensor:
        """The tensors of all trials: (trials, *shape)."""
        if self._stacked is None:
            assert self.pending is not None
            with as_outside_of_inference():
                self.resolve(self.pending.outcome())
            assert self._stacked is not None
        if self._stacked.size(0) != self.trials.count:
            raise FusionError(
                f"{user_line()}\n  uses a tensor kept from when the model had {self._stacked.shape[0]} "
                f"trials; now it has {self.trials.count}, so clear what the model keeps between forwards"
            )
        return self._stacked

    def resolve(self, stacked: Tensor) -> None:
        """Set what was pending."""
        self._stacked, self.pending = stacked, None

    # Known here, as rules and modules ask for them many times a step, and torch would look for a rule first.

    def dim(self) -> int:
        """Axes of one trial's tensor."""
        return (self._stacked if self.pending is None else self.pending.like).dim() - 1  # type: ignore[union-attr]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """That of one trial's tensor."""
        return (self._stacked if self.pending is None else self.pending.like).shape[1:]  # type: ignore[union-attr]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

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
        # The second is called in inference mode.
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            # torch.arange(x) and similar functions read the value in C++.
            return RULES[torch.Tensor.item](torch.Tensor.item, args, {})
        raise PastRulesError(
            f"{user_line()}\n  passes a trial tensor to {func}, which has no rule",
            "name the module in fuse(..., unfused=[...]), or write the call another way",
        )

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        """The tensor of the trial that the memo names, else of all trials; without autograd history."""
        if id(self) not in memo:
            number = memo.get(OF_TRIAL)
            inner = self.stacked.detach()
            of_all = number is None
            memo[id(self)] = TrialTensor(inner.clone(), self.trials) if of_all else inner[number].clone()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return TrialTensor, (self.stacked.detach(), self.trials)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TrialTensor(trials={self.trials.count}, shape={tuple(self.shape)})"


def trials_of(*values: Any) -> Trials:
    """The `Trials` of the first trial tensor among `values`."""
    for value in values:
        if type(value) is TrialTensor:
            return value.trials
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
    """`outcome` with its tensors, which have the trials axis first, as trial tensors."""
    if isinstance(outcome, Tensor):
        return TrialTensor(outcome, trials)
    if type(outcome) in (tuple, list) and all(isinstance(x, Tensor) for x in outcome):
        return type(outcome)([TrialTensor(x, trials) for x in outcome])
    if isinstance(outcome, (tuple, list)):
        return pytree.tree_map(lambda x: TrialTensor(x, trials) if isinstance(x, Tensor) else x, outcome)
    return outcome


def unwrap(value: Any, trials: Trials) -> Tensor:
    """`value` with the trials axis first; a shared tensor or a number is expanded without a copy."""
    if isinstance(value, TrialTensor):
        return value.stacked
    if isinstance(value, PerTrial):
        return on_device(value.values, torch.get_default_dtype(), torch.device("cpu"))
    shared = value if isinstance(value, Tensor) else torch.tensor(value)
    return shared.expand(trials.count, *shared.shape)
