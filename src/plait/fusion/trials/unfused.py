"""Submodules that run trial by trial inside a fused model: ordinary modules, one per trial.

Each has its own Python state, hooks and attributes, and runs the user's code on plain tensors. Its parameters
and buffers are views of the fused ones, so that optimizers, checkpoints and changes of the trials see one
tensor for all trials.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.copies import independent_copy
from plait.fusion.describe import describe
from plait.fusion.dispatch.install import slots_of
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError, user_line
from plait.fusion.forward_patches import Patch
from plait.fusion.sharing import equal_values
from plait.fusion.trials.padding import Rows
from plait.fusion.trials.per_trial import PerTrial
from plait.fusion.trials.row_wise import call_once, is_row_wise, rows_at
from plait.fusion.trials.single_trial import SingleTrialMode, seeded_for

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class SharesTensors(Protocol):
    """A fused module, some tensors of which all trials share."""

    module: nn.Module

    @property
    def shared(self) -> dict[str, Tensor]: ...

    def shared_ids(self) -> set[int]: ...

    def unshare(self, name: str) -> None: ...


class PerTrialModules:
    """The per-trial modules of one submodule `part` of a fused model.

    This object takes ownership of `modules`. `tied` are the parameters of `part` that other submodules also
    hold: their gradients flow through slices, those of the others through per-trial parameters. Of tensors
    that all trials of `fused` share, the modules of all trials hold the same memory.
    """

    def __init__(
        self,
        part: nn.Module,
        modules: Sequence[nn.Module],
        trials: Trials,
        tied: set[int],
        why: str,
        fused: SharesTensors,
    ) -> None:
        self.part = part
        self.modules = list(modules)
        self.trials = trials
        self.why = why
        self._tied = tied
        self._fused = fused
        # The modes in which the module was seen not to write to shared tensors.
        self._checked: set[bool] = set()
        # Whether the module writes to shared input tensors, so that each trial needs a copy; None if unknown.
        self._copies: bool | None = None
        for name in _HOOKS:  # the per-trial modules have them
            setattr(part, name, OrderedDict())
        part.forward = Patch(self._run, part)
        self.point()

    def _parameters(self, module: nn.Module) -> list[tuple[nn.Parameter, Any]]:
        """Pairs of a fused parameter and one trial's, without duplicates."""
        stacked = dict(_named(self.part, "_parameters"))
        pairs = {}
        for name, parameter in _named(module, "_parameters"):
            if name in stacked and parameter.is_leaf:
                pairs[id(parameter)] = (_inner(stacked[name]), parameter)
        return list(pairs.values())

    def point(self, only: Container[int] | None = None) -> None:
        """Make the trials' parameters and buffers views of the current fused ones; or `only` of these, by id.

        Gradients of the trials' parameters are added to the fused ones.
        """
        shared = self._fused.shared_ids()
        for number, module in enumerate(self.modules):
            for stacked, parameter in self._parameters(module):
                slice_ = stacked.data if id(stacked) in shared else stacked.data[number]
                if only is None or id(stacked) in only:
                    self._point_at(stacked, parameter, slice_, number)
        buffers = dict(_named(self.part, "_buffers"))
        for number, module in enumerate(self.modules):
            kept: dict[int, Tensor] = {}
            for holder, name, key in _slots(module, "_buffers"):
                inner = _inner(buffers.get(key))
                if inner is not None and (only is None or id(inner) in only):
                    own = inner.detach() if id(inner) in shared else inner.detach()[number]
                    # Through `data`, each trial has its own version counter.
                    holder[name] = kept.setdefault(id(inner), own.data)

    def _point_at(self, stacked: nn.Parameter, parameter: nn.Parameter, slice_: Tensor, number: int) -> None:
        if parameter.requires_grad != stacked.requires_grad:
            parameter.requires_grad_(stacked.requires_grad)
        if not _is_same_memory(parameter, slice_):
            parameter.data = slice_
        if parameter.requires_grad and id(stacked) not in self._tied and "deliver" not in parameter.__dict__:
            parameter.__dict__["deliver"] = parameter.register_post_accumulate_grad_hook(
                _Deliver(stacked, number)
            )

    def restore(self, tied: set[int]) -> None:
        """Connect to the fused parameters again, after copying or unpickling."""
        self._tied = tied
        self._replace_all(self.modules)

    def reorder(self, numbers: Sequence[int]) -> None:
        """Select the trials `numbers`, in this order; one that occurs twice is copied."""
        used: set[int] = set()
        modules = []
        for number in numbers:
            module = self.modules[number]
            modules.append(independent_copy(module) if number in used else module)
            used.add(number)
        self._replace_all(modules)

    def replace(self, number: int, module: nn.Module) -> None:
        """Replace the module of one trial."""
        self._replace_all([module if index == number else other for index, other in enumerate(self.modules)])

    def _replace_all(self, modules: list[nn.Module]) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                if (handle := parameter.__dict__.pop("deliver", None)) is not None:
                    handle.remove()
        self.modules = modules
        self.point()

    def copy_of(self, number: int, memo: dict[int, Any]) -> nn.Module:
        """A copy of one trial's module, independent of the fused model; `memo` has copies of its tensors."""
        module = self.modules[number]
        self.point()
        for kind in ("_parameters", "_buffers"):
            stacked = dict(_named(self.part, kind))
            for key, tensor in _named(module, kind):
                if key in stacked and id(stacked[key]) in memo:
                    memo[id(tensor)] = memo[id(stacked[key])]
        return independent_copy(module, memo)

    def _run(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.point()
        slices = self._slices_of_tied()
        with _one_by_one(self.trials) as singles:
            outcomes = self._outcomes(singles, slices, args, kwargs)
        self._keep_written()
        return _joined(outcomes, self.trials, type(self.part).__qualname__)

    def _outcomes(
        self, singles: list[Streams], slices: dict[int, tuple[Tensor, ...]], args: Any, kwargs: Any
    ) -> list[Any]:
        given = [_slice_of((args, kwargs), number, self.trials.rows) for number in range(self.trials.count)]
        plain = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Tensor]
        pristine = {id(leaf): leaf.clone() for leaf in plain} if self._copies is None else {}
        counted = not any(leaf.is_inference() for leaf in plain)
        versions = [leaf._version for leaf in plain] if counted else []
        outcomes = []
        for number, (module, streams) in enumerate(zip(self.modules, singles)):
            trial_args, trial_kwargs = given[number]
            # The last trial may write to the tensor itself, as a single model would.
            if self._copies and (number if pristine else number < self.trials.count - 1):
                trial_args, trial_kwargs = _with_copies((trial_args, trial_kwargs), plain, pristine)
            _follow_modes(self.part, module)
            shape = _shape_of_objects(trial_args, trial_kwargs) if self._copies is None else None
            watched = self._unshare_written() if number == 0 else nullcontext()
            held = _holding(slices, module, self.part, number)
            with watched, held, seeded_for(streams), SingleTrialMode(streams):
                outcomes.append(module(*trial_args, **trial_kwargs))
            if self._copies is None:
                if shape != _shape_of_objects(trial_args, trial_kwargs):  # such as a cache
                    raise FusionError(
                        f"{type(self.part).__qualname__} changes an argument object that all trials "
                        f"share; run the module that calls it trial by trial"
                    )
                if counted:
                    self._copies = versions != [leaf._version for leaf in plain]
                else:  # inference mode has no version counters
                    self._copies = any(not torch.equal(leaf, pristine[id(leaf)]) for leaf in plain)
        return outcomes

    def _shared(self) -> dict[str, Tensor]:
        """The shared tensors in this part, by their names in the fused module."""
        inner = {id(_inner(t)) for kind in ("_parameters", "_buffers") for _, t in _named(self.part, kind)}
        return {name: tensor for name, tensor in self._fused.shared.items() if id(tensor) in inner}

    @contextmanager
    def _unshare_written(self) -> Iterator[None]:
        """Context for the first trial: each trial gets its own of the shared tensors that are written in it.

        Values are compared once in each mode of the module.
        """
        if self.part.training in self._checked or not (shared := self._shared()):
            yield
            return
        self._checked.add(self.part.training)
        # Backward may need what is written to a buffer, so the trial writes to a copy from the beginning.
        before = {name: tensor.detach().clone() for name, tensor in shared.items()}
        copies = self._copy_buffers_of_first({id(tensor) for tensor in shared.values()})
        yield
        own_ids = set()
        for name, tensor in shared.items():
            current = copies.get(id(tensor), tensor)
            if not equal_values(current, before[name]):
                first = current.detach().clone()
                tensor.data.copy_(before[name])
                if name in self._fused.shared:  # else it was, under another name
                    self._fused.unshare(name)
                own = _inner(next(slot.tensor for slot in slots_of(self._fused.module) if slot.key == name))
                own.data[0].copy_(first)
                own_ids.add(id(own))
        self.point(only=own_ids)
        # Buffers that were not written; the module may have replaced others.
        held = {id(copies[id(tensor)]): tensor for tensor in shared.values() if id(tensor) in copies}
        for holder, key, _ in _slots(self.modules[0], "_buffers"):
            if (unwritten := held.get(id(holder[key]))) is not None:
                holder[key] = unwritten.detach().data

    def _copy_buffers_of_first(self, shared: Container[int]) -> dict[int, Tensor]:
        """Give the first trial copies of its shared buffers, by the id of these."""
        buffers, copies = dict(_named(self.part, "_buffers")), dict[int, Tensor]()
        for holder, name, key in _slots(self.modules[0], "_buffers"):
            inner = _inner(buffers.get(key))
            if inner is not None and id(inner) in shared:
                holder[name] = copies.setdefault(id(inner), inner.detach().clone())
        return copies

    def _unshare_replaced(self) -> None:
        """Give each trial its own of the shared parameters whose data a trial has replaced."""
        if not (names := {id(tensor): name for name, tensor in self._shared().items()}):
            return
        pairs = [pair for module in self.modules for pair in self._parameters(module)]
        for shared, parameter in pairs:
            if id(shared) in names and not _is_same_memory(parameter, shared):
                self._fused.unshare(names.pop(id(shared)))

    def _refuse_written(self) -> None:
        """Raise FusionError if a trial has written to a buffer that all share, since it was checked."""
        shared = {id(tensor) for tensor in self._shared().values()}
        inner = {key: id(_inner(tensor)) for key, tensor in _named(self.part, "_buffers")}
        for module in self.modules:
            for key, buffer in _named(module, "_buffers"):
                # It was made when the trials' modules were pointed at the fused tensors.
                if inner.get(key) in shared and not buffer.is_inference() and buffer._version:
                    raise FusionError(
                        f"{type(self.part).__qualname__} writes to its buffer {key!r}, which all trials "
                        f"share; call fused.unshare before, or fuse the models with share='never'"
                    )

    def _slices_of_tied(self) -> dict[int, tuple[Tensor, ...]]:
        slices, shared = {}, self._fused.shared_ids()
        for _, stacked in _named(self.part, "_parameters"):
            inner = _inner(stacked)
            if id(inner) in self._tied and id(inner) not in shared:
                slices[id(inner)] = inner.unbind()
        return slices

    @torch.no_grad()
    def _keep_written(self) -> None:
        """Copy replaced parameter data and buffers back to the fused tensors."""
        self._refuse_written()
        self._unshare_replaced()
        shared = self._fused.shared_ids()
        for number, module in enumerate(self.modules):
            for stacked, parameter in self._parameters(module):
                if id(stacked) in shared:
                    continue
                slice_ = stacked.data[number]
                if not _is_same_memory(parameter, slice_):
                    slice_.copy_(parameter.data)
                    parameter.data = slice_
        every = [dict(_named(module, "_buffers")) for module in self.modules]
        for holder, name, key in _slots(self.part, "_buffers"):
            if holder[name] is None or any(key not in parameter for parameter in every):
                continue
            inner, values = _inner(holder[name]), [parameter[key] for parameter in every]
            parts = [inner] * len(values) if id(inner) in shared else inner
            if all(_is_same_memory(value, part) for value, part in zip(values, parts)):
                continue
            if len({tuple(value.shape) for value in values}) > 1:
                raise FusionError(f"buffer {key}: has different shapes in different trials, expected one")
            with torch.enable_grad():
                holder[name] = TrialTensor(torch.stack(values), self.trials)


def _joined(outcomes: list[Any], trials: Trials, who: str) -> Any:
    """The results of all trials as one."""
    flat = [pytree.tree_flatten(outcome) for outcome in outcomes]
    if any(spec != flat[0][1] for _, spec in flat):
        raise FusionError(f"{user_line()}\n  returns a different structure in some trials")
    leaves = [_joined_leaf(values, trials, who) for values in zip(*(values for values, _ in flat))]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined_leaf(values: tuple[Any, ...], trials: Trials, who: str) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if all(isinstance(value, Tensor) for value in values):
        return TrialTensor(torch.stack(_padded(values, trials.rows)), trials)
    if all(isinstance(value, float) for value in values):
        return first if len(set(values)) == 1 else PerTrial(values)
    if len({describe(value) for value in values}) == 1 and not _holds_tensors(first):
        return first
    if len({type(value) for value in values}) > 1 or not hasattr(first, "__dict__"):
        raise FusionError(
            f"{who} returns {first!r} in one trial and "
            f"{next(v for v in values if describe(v) != describe(first))!r} in another, and the "
            f"fused model around it cannot use both; run the module that calls it trial by trial"
        )
    # An object of the user's class that holds each trial's tensors.
    made = copy.copy(first)
    for name in vars(first):
        made.__dict__[name] = _joined([getattr(value, name) for value in values], trials, who)
    return made


@contextmanager
def _one_by_one(trials: Trials) -> Iterator[list[Streams]]:
    """Context in which trials run one by one on plain tensors; gives each one's random stream."""
    assert trials.streams is not None, "trials ran outside of their fused model"
    singles = [trials.streams.of_trial(number) for number in range(trials.count)]
    before, trials.is_alone = trials.is_alone, True
    try:
        yield singles
    finally:
        trials.is_alone = before
    trials.streams.follow(singles)


def apply_alone(
    trials: Trials, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of `function`, such as a custom autograd function, for each trial, on plain tensors."""
    if (at := rows_at(args, kwargs)) is not None:
        with _one_by_one(trials):
            if is_row_wise(function, args, kwargs, at):
                return call_once(function, args, kwargs, at)
    outcomes = []
    with _one_by_one(trials) as singles:
        for number, streams in enumerate(singles):
            trial_args, trial_kwargs = _slice_of((args, kwargs), number, None)
            with SingleTrialMode(streams):
                outcomes.append(function(*trial_args, **trial_kwargs))
    return _joined(outcomes, trials, getattr(function, "__qualname__", "a function"))


class _Deliver:
    """Gradient hook that adds one trial's gradient to the fused parameter's."""

    def __init__(self, stacked: nn.Parameter, number: int) -> None:
        self.stacked = stacked
        self.number = number

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self.stacked.grad is None:
            self.stacked.grad = torch.zeros_like(self.stacked)
            # Trials that are not in this set have no gradient, not even zeros.
            self.stacked.grad.__dict__["of_trials"] = set()
        self.stacked.grad[self.number].add_(parameter.grad)
        self.stacked.grad.__dict__.get("of_trials", set()).add(self.number)
        parameter.grad = None


def trials_without_gradient(parameter: Tensor, count: int) -> tuple[int, ...]:
    """The trials for which a fused parameter has no gradient."""
    if parameter.grad is None:
        return tuple(range(count))
    known = parameter.grad.__dict__.get("of_trials")
    if known is None or len(known) == count:
        return ()
    return tuple(number for number in range(count) if number not in known)


def trials_without_gradients(parameters: Sequence[Tensor], count: int) -> list[tuple[int, ...]]:
    """The same for each of `parameters`, which have gradients."""
    return [
        trials_without_gradient(parameter, count) if "of_trials" in parameter.grad.__dict__ else ()
        for parameter in parameters
    ]


def note_trials(parameter: Tensor, trials: Sequence[int]) -> None:
    """Set the trials that have a gradient of a fused parameter; none given means all."""
    if parameter.grad is not None:
        parameter.grad.__dict__.pop("of_trials", None)
        if trials:
            parameter.grad.__dict__["of_trials"] = set(trials)


@contextmanager
def _holding(
    slices: dict[int, tuple[Tensor, ...]], module: nn.Module, part: nn.Module, number: int
) -> Iterator[None]:
    """Context in which one trial's module holds slices of tied parameters of the fused `part`."""
    stacked = dict(_named(part, "_parameters")) if slices else {}
    held = [
        (holder, name, holder[name], slices[id(_inner(stacked[key]))][number])
        for holder, name, key in (_slots(module, "_parameters") if slices else ())
        if key in stacked and id(_inner(stacked[key])) in slices
    ]
    for holder, name, _, slice_ in held:
        holder[name] = slice_
    try:
        yield
    finally:
        for holder, name, parameter, slice_ in held:
            if not _is_same_memory(slice_, parameter):  # its data was replaced
                parameter.data.copy_(slice_.data)
            holder[name] = parameter


def _follow_modes(part: nn.Module, module: nn.Module) -> None:
    """Set the training mode of a trial's module and its submodules to that of the fused ones."""
    parts = dict(part.named_modules())
    for path, submodule in module.named_modules():
        if path in parts and submodule.training != parts[path].training:
            submodule.training = parts[path].training


def _holds_tensors(value: Any) -> bool:
    inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return any(isinstance(part, Tensor) for part in inner)


def _shape_of_objects(args: Any, kwargs: Any) -> Any:
    """A comparable description of the arguments without tensors."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module))]
    return spec, describe(objects)


def _inner(tensor: Any) -> Any:
    return tensor.stacked if isinstance(tensor, TrialTensor) else tensor


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _slots(module: nn.Module, kind: str) -> list[tuple[Any, str, str]]:
    """The slots of parameters or buffers: dictionary, name in it, full name."""
    return [
        (getattr(part, kind), name, f"{path}.{name}" if path else name)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in list(getattr(part, kind).keys())
    ]


def _named(module: nn.Module, kind: str) -> list[tuple[str, Any]]:
    return [(key, holder[name]) for holder, name, key in _slots(module, kind) if holder[name] is not None]


def _slice_of(values: Any, number: int, rows: Rows | None) -> Any:
    def pick(value: Any) -> Any:
        if isinstance(value, TrialTensor):
            part = value.stacked[number]
            return part if rows is None else rows.cut(part, number)
        if rows is not None and type(value) is Tensor and value.dim() and len(value) == rows.length:
            return rows.cut(value, number)
        return value.of(number) if isinstance(value, PerTrial) else value

    return pytree.tree_map(pick, values)


def _with_copies(values: Any, plain: list[Tensor], pristine: dict[int, Tensor]) -> Any:
    """The values with shared tensors as they were before the first trial ran."""
    known = {id(leaf) for leaf in plain}

    def pick(value: Any) -> Any:
        if type(value) is Tensor and id(value) in known:
            return pristine.get(id(value), value).clone()
        return value

    return pytree.tree_map(pick, values)


def _padded(values: tuple[Tensor, ...], rows: Rows | None) -> list[Tensor]:
    """The trials' results in one shape: padding is added to results without it."""
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) == 1:
        return list(values)
    if rows is not None and all(rows.can_fill(value, number) for number, value in enumerate(values)):
        filled = [rows.fill(value, number) for number, value in enumerate(values)]
        if len({tuple(value.shape) for value in filled}) == 1:
            return filled
    raise FusionError(
        f"{user_line()}\n  has different shapes in different trials: {shapes}; fused trials need one shape"
    )
