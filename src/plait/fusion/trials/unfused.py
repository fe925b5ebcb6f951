"""Submodules that run trial by trial inside a fused model: real modules, one for each trial.

Each has its own Python state, hooks and attributes, and runs the user's code on plain tensors. Its parameters
and buffers lie in the memory of the fused ones, so that optimizers, checkpoints and changes of the trials
see one tensor for all.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.closures import copied_closures
from plait.fusion.describe import describe
from plait.fusion.dispatch.random import Streams
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError, user_line
from plait.fusion.patches import Patch
from plait.fusion.trials.alone import LoneMode, seeded_for
from plait.fusion.trials.padding import Rows
from plait.fusion.trials.per_trial import PerTrial

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class OwnModules:
    """The trials' own modules behind one submodule `part` of a fused model.

    `own` become this object's. Parameters of `part` that other submodules hold too are in `tied`: their
    gradients come back through slices, those of the others through parameters of the trials.
    """

    def __init__(
        self, part: nn.Module, own: Sequence[nn.Module], trials: Trials, tied: set[int], why: str
    ) -> None:
        self.part = part
        self.modules = list(own)
        self.trials = trials
        self.why = why
        self._tied = tied
        # Whether the module writes into tensors that all trials share, so that each gets a copy.
        self._copies: bool | None = None
        for name in _HOOKS:  # the trials' own modules have them
            setattr(part, name, OrderedDict())
        part.forward = Patch(self._run, part)
        self.point()

    def _parameters(self, module: nn.Module) -> list[tuple[nn.Parameter, Any]]:
        """The fused parameters and one trial's, each once."""
        stacked = dict(_named(self.part, "_parameters"))
        found = {}
        for name, own in _named(module, "_parameters"):
            if name in stacked and own.is_leaf:
                found[id(own)] = (_inner(stacked[name]), own)
        return list(found.values())

    def point(self) -> None:
        """Let parameters and buffers of the trials lie where the fused ones are now.

        Gradients of the parameters arrive at the fused ones.
        """
        for number, module in enumerate(self.modules):
            for stacked, own in self._parameters(module):
                self._point_at(stacked, own, number)
        buffers = dict(_named(self.part, "_buffers"))
        for number, module in enumerate(self.modules):
            kept: dict[int, Tensor] = {}
            for holder, name, key in _slots(module, "_buffers"):
                if buffers.get(key) is not None:
                    inner = _inner(buffers[key])
                    # By `data` autograd sees one tensor a trial: what one writes is no change of others'.
                    holder[name] = kept.setdefault(id(inner), inner.detach()[number].data)

    def _point_at(self, stacked: nn.Parameter, own: nn.Parameter, number: int) -> None:
        if own.requires_grad != stacked.requires_grad:
            own.requires_grad_(stacked.requires_grad)
        slice_ = stacked.data[number]
        if not _is_same_memory(own, slice_):
            own.data = slice_
        if own.requires_grad and id(stacked) not in self._tied and "deliver" not in own.__dict__:
            own.__dict__["deliver"] = own.register_post_accumulate_grad_hook(_Deliver(stacked, number))

    def restore(self, tied: set[int]) -> None:
        """Find the fused parameters again, after all was copied or unpickled."""
        self._tied = tied
        self._replace_all(self.modules)

    def reorder(self, numbers: Sequence[int]) -> None:
        """Let the trials be those at `numbers` so far; one that comes twice is copied."""
        taken: set[int] = set()
        modules = []
        for number in numbers:
            module = self.modules[number]
            modules.append(own_copy(module) if number in taken else module)
            taken.add(number)
        self._replace_all(modules)

    def replace(self, number: int, module: nn.Module) -> None:
        """Put another trial's module in the place of one."""
        self._replace_all([module if place == number else own for place, own in enumerate(self.modules)])

    def _replace_all(self, modules: list[nn.Module]) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                if (handle := parameter.__dict__.pop("deliver", None)) is not None:
                    handle.remove()
        self.modules = modules
        self.point()

    def copy_of(self, number: int, memo: dict[int, Any]) -> nn.Module:
        """The module of one trial, apart from the fused model; `memo` has copies of its tensors."""
        module = self.modules[number]
        self.point()
        for kind in ("_parameters", "_buffers"):
            stacked = dict(_named(self.part, kind))
            for key, own in _named(module, kind):
                if key in stacked and id(stacked[key]) in memo:
                    memo[id(own)] = memo[id(stacked[key])]
        return own_copy(module, memo)

    def _run(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        trials = self.trials
        assert trials.streams is not None, "an unfused part ran outside of its fused model"
        self.point()
        slices = self._slices_of_tied()
        singles = [trials.streams.of_trial(number) for number in range(trials.count)]
        before = trials.is_alone
        trials.is_alone = True
        try:
            outcomes = self._outcomes(singles, slices, args, kwargs)
        finally:
            trials.is_alone = before
        trials.streams.follow(singles)
        self._keep_written()
        return _Joiner(trials, type(self.part).__qualname__).join(outcomes)

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
            own_args, own_kwargs = given[number]
            # The last trial may write into the tensor itself, as a model alone would.
            if self._copies and (number if pristine else number < self.trials.count - 1):
                own_args, own_kwargs = _with_copies((own_args, own_kwargs), plain, pristine)
            _follow_modes(self.part, module)
            shape = _shape_of_objects(own_args, own_kwargs) if self._copies is None else None
            with _Slices(self, module, number, slices), seeded_for(streams), LoneMode(streams):
                outcomes.append(module(*own_args, **own_kwargs))
            if self._copies is None:
                self._refuse_changed(shape, _shape_of_objects(own_args, own_kwargs))
                if counted:
                    self._copies = versions != [leaf._version for leaf in plain]
                else:  # in inference mode nobody counts writes
                    self._copies = any(not torch.equal(leaf, pristine[id(leaf)]) for leaf in plain)
        return outcomes

    def _refuse_changed(self, before: Any, after: Any) -> None:
        """Refuse a module that changes an object of its caller, a cache say, which all trials share."""
        if before != after:
            raise FusionError(
                f"{type(self.part).__qualname__} changes an object that it was given and that all trials "
                f"share; run the module that calls it trial by trial"
            )

    def _slices_of_tied(self) -> dict[int, tuple[Tensor, ...]]:
        found = {}
        for _, stacked in _named(self.part, "_parameters"):
            inner = _inner(stacked)
            if id(inner) in self._tied:
                found[id(inner)] = inner.unbind()
        return found

    @torch.no_grad()
    def _keep_written(self) -> None:
        """Keep what forwards put in the place of parameters' data and of buffers."""
        for number, module in enumerate(self.modules):
            for stacked, own in self._parameters(module):
                slice_ = stacked.data[number]
                if not _is_same_memory(own, slice_):
                    slice_.copy_(own.data)
                    own.data = slice_
        every = [dict(_named(module, "_buffers")) for module in self.modules]
        for holder, name, key in _slots(self.part, "_buffers"):
            if holder[name] is None or any(key not in own for own in every):
                continue
            inner, pieces = _inner(holder[name]), [own[key] for own in every]
            if all(_is_same_memory(piece, inner[number]) for number, piece in enumerate(pieces)):
                continue
            if len({tuple(piece.shape) for piece in pieces}) > 1:
                raise FusionError(f"buffer {key}: has another shape in some trials, fused trials have one")
            with torch.enable_grad():
                holder[name] = TrialTensor(torch.stack(pieces), self.trials)


class _Joiner:
    """Makes one outcome of what each trial returned."""

    def __init__(self, trials: Trials, who: str) -> None:
        self.trials = trials
        self.who = who

    def join(self, outcomes: list[Any]) -> Any:
        flat = [pytree.tree_flatten(outcome) for outcome in outcomes]
        if any(spec != flat[0][1] for _, spec in flat):
            raise FusionError(f"{user_line()}\n  returns something of another structure in some trials")
        joined = [self._join_one(values) for values in zip(*(values for values, _ in flat))]
        return pytree.tree_unflatten(joined, flat[0][1])

    def _join_one(self, values: tuple[Any, ...]) -> Any:
        if all(value is values[0] for value in values):
            return values[0]
        if all(isinstance(value, Tensor) for value in values):
            return TrialTensor(torch.stack(_padded(values, self.trials.rows)), self.trials)
        if all(isinstance(value, float) for value in values):
            return values[0] if len(set(values)) == 1 else PerTrial(values)
        if len({describe(value) for value in values}) == 1 and not _holds_tensors(values[0]):
            return values[0]
        if len({type(value) for value in values}) == 1 and hasattr(values[0], "__dict__"):
            return self._join_objects(values)
        raise FusionError(
            f"{self.who} returns {values[0]!r} in one trial and "
            f"{next(v for v in values if describe(v) != describe(values[0]))!r} in another, which the fused "
            f"model around it cannot both use; run the module that calls it trial by trial"
        )

    def _join_objects(self, values: tuple[Any, ...]) -> Any:
        """An object of the user's own class that holds each trial's tensors."""
        made = copy.copy(values[0])
        for name in vars(values[0]):
            made.__dict__[name] = self.join([getattr(value, name) for value in values])
        return made


def apply_alone(
    trials: Trials, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What `function` returns for each trial, on plain tensors: a custom function of autograd, say."""
    assert trials.streams is not None
    singles = [trials.streams.of_trial(number) for number in range(trials.count)]
    before, trials.is_alone = trials.is_alone, True
    outcomes = []
    try:
        for number, streams in enumerate(singles):
            own_args, own_kwargs = _slice_of((args, kwargs), number, None)
            with LoneMode(streams):
                outcomes.append(function(*own_args, **own_kwargs))
    finally:
        trials.is_alone = before
    trials.streams.follow(singles)
    return _Joiner(trials, getattr(function, "__qualname__", "a function")).join(outcomes)


class _Deliver:
    """Adds the gradient of one trial's parameter to the fused one's."""

    def __init__(self, stacked: nn.Parameter, number: int) -> None:
        self.stacked = stacked
        self.number = number

    def __call__(self, own: Tensor) -> None:
        assert own.grad is not None
        if self.stacked.grad is None:
            self.stacked.grad = torch.zeros_like(self.stacked)
            # Trials that are not in it have no gradient: not even one of zeros.
            self.stacked.grad.__dict__["of_trials"] = set()
        self.stacked.grad[self.number].add_(own.grad)
        self.stacked.grad.__dict__.get("of_trials", set()).add(self.number)
        own.grad = None


def trials_without_gradient(parameter: Tensor, count: int) -> tuple[int, ...]:
    """The trials of which a fused parameter has no gradient."""
    if parameter.grad is None:
        return tuple(range(count))
    known = parameter.grad.__dict__.get("of_trials")
    if known is None or len(known) == count:
        return ()
    return tuple(number for number in range(count) if number not in known)


def note_trials(parameter: Tensor, trials: Sequence[int]) -> None:
    """Say of which trials a fused parameter's gradient is; of all where none is given."""
    if parameter.grad is not None:
        parameter.grad.__dict__.pop("of_trials", None)
        if trials:
            parameter.grad.__dict__["of_trials"] = set(trials)


class _Slices:
    """Within, one trial's module holds slices of the fused parameters that other submodules use too."""

    def __init__(
        self, modules: OwnModules, module: nn.Module, number: int, slices: dict[int, tuple[Tensor, ...]]
    ) -> None:
        stacked = dict(_named(modules.part, "_parameters"))
        self._held = [
            (holder, name, holder[name], slices[id(_inner(stacked[key]))][number])
            for holder, name, key in (_slots(module, "_parameters") if slices else ())
            if key in stacked and id(_inner(stacked[key])) in slices
        ]

    def __enter__(self) -> None:
        for holder, name, _, slice_ in self._held:
            holder[name] = slice_

    def __exit__(self, *_: object) -> None:
        for holder, name, own, slice_ in self._held:
            if not _is_same_memory(slice_, own):  # its data were set anew
                own.data.copy_(slice_.data)
            holder[name] = own


def own_copy(module: nn.Module, memo: dict[int, Any] | None = None, hooks: bool = True) -> nn.Module:
    """A copy that shares no memory; tensors that a forward left in it are copied without their history.

    With `hooks`, parameters keep those that their gradients have, which a copy by Python loses.
    """
    memo = {} if memo is None else memo
    for value in held_values(module):
        if isinstance(value, Tensor) and not isinstance(value, TrialTensor) and not value.is_leaf:
            memo.setdefault(id(value), value.detach().clone())
    # Without gradients, as copies of scripted modules would remember where they come from.
    with torch.no_grad(), copied_closures(module):
        try:
            made = copy.deepcopy(module, memo)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError, NotImplementedError, AttributeError) as failure:
            line = " ".join(str(failure).split())[:200]
            raise FusionError(
                f"fuse: {type(module).__qualname__} cannot be copied ({type(failure).__name__}: {line}), "
                f"which fused trials are made by; train each model alone"
            ) from failure
    for parameter, own in zip(module.parameters(), made.parameters()):
        if own.requires_grad != parameter.requires_grad:
            own.requires_grad_(parameter.requires_grad)
        for hook in gradient_hooks(parameter) if hooks and parameter is not own else ():
            own.register_hook(hook)
    return made


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """The functions that were registered for a parameter's gradient."""
    return list((parameter._backward_hooks or {}).values())


def copy_hooks(hooks: Sequence[Any], parameter: Tensor) -> None:
    """Register hooks for a parameter's gradient where a copy has lost them."""
    if not gradient_hooks(parameter):
        for hook in hooks:
            parameter.register_hook(hook)


def held_values(module: nn.Module) -> list[Any]:
    """What the attributes of a module and its submodules hold, also within containers and plain objects."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value for part in module.modules() for value in vars(part).values()]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(value, PerTrial):
            found.append(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, Patch)):
            waiting += vars(value).values()
    return found


def _follow_modes(part: nn.Module, module: nn.Module) -> None:
    """Let a trial's module and its submodules be in training where the fused ones are."""
    parts = dict(part.named_modules())
    for path, own in module.named_modules():
        if path in parts and own.training != parts[path].training:
            own.training = parts[path].training


def _holds_tensors(value: Any) -> bool:
    inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return any(isinstance(part, Tensor) for part in inner)


def _shape_of_objects(args: Any, kwargs: Any) -> Any:
    """What arguments hold besides tensors, in a form that can be compared."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    objects = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module))]
    return spec, describe(objects)


def _inner(tensor: Tensor) -> Any:
    return tensor.stacked if isinstance(tensor, TrialTensor) else tensor


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _slots(module: nn.Module, kind: str) -> list[tuple[Any, str, str]]:
    """Where the parameters or buffers are held: the dictionary, the name there, the whole name."""
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
            own = value.stacked[number]
            return own if rows is None else rows.cut(own, number)
        if rows is not None and type(value) is Tensor and value.dim() and len(value) == rows.length:
            return rows.cut(value, number)
        return value.of(number) if isinstance(value, PerTrial) else value

    return pytree.tree_map(pick, values)


def _with_copies(values: Any, plain: list[Tensor], pristine: dict[int, Tensor]) -> Any:
    """The values with tensors that all trials share as they were before the first trial ran."""
    known = {id(leaf) for leaf in plain}

    def pick(value: Any) -> Any:
        if type(value) is Tensor and id(value) in known:
            return pristine.get(id(value), value).clone()
        return value

    return pytree.tree_map(pick, values)


def _padded(values: tuple[Tensor, ...], rows: Rows | None) -> list[Tensor]:
    """The trials' outcomes in one shape: what has rows of their own gets its padding back."""
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) == 1:
        return list(values)
    if rows is not None and all(rows.can_fill(value, number) for number, value in enumerate(values)):
        filled = [rows.fill(value, number) for number, value in enumerate(values)]
        if len({tuple(value.shape) for value in filled}) == 1:
            return filled
    raise FusionError(f"{user_line()}\n  has another shape in some trials: {shapes}; fused trials have one")
