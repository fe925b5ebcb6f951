"""The state of a model and of its optimizer, by parameter name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.core.errors import CheckpointError, DataError, JobError
from plait.data.trees import put_together, take_apart
from plait.pipeline.cpu.linear import with_same_strides
from plait.verification.optimizer_load import load_state_dict

Tensors = dict[str, Tensor]
# Prefixes of values from param groups and from attributes of the optimizer; stored with each parameter.
_GROUP, _ATTRIBUTE = "group:", "self:"
# Attributes that Plait sets on optimizers.
START, LR_FACTOR = "start_of_plait", "lr_factor_of_plait"
# Suffix of Python numbers, which are restored as numbers.
_NUMBER = ":number"
_EXTRA_STATE = b"plait extra state\n"


def tensors_of(model: torch.nn.Module) -> Tensors:
    """The parameters and buffers of a model, each by its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tied_aliases(model: torch.nn.Module) -> dict[str, str]:
    """Aliases of tied parameters and buffers in the state_dict, each mapped to the first name."""
    first: dict[int, str] = {}
    named = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in named.items() if first[id(tensor)] != name}


def is_known(optimizer: object) -> bool:
    """Whether an optimizer is torch's or Plait's: these keep neither gradients nor state in their groups."""
    return type(optimizer).__module__.startswith(("torch.optim.", "plait."))


def model_state(model: torch.nn.Module) -> Tensors:
    """The model's parameters and buffers by name; a tied one under each of its names.

    The result of a module's `get_extra_state` is packed into a tensor. Raises JobError if that is impossible.
    """
    state = {}
    for name, value in model.state_dict().items():
        state[name] = value.detach() if isinstance(value, Tensor) else _pack(name, value)
    return state


def whole_state(model: torch.nn.Module, gathered: Mapping[str, Tensor], tied: Mapping[str, str]) -> Tensors:
    """The state of `model` with the tensors that were `gathered` of all stages; `tied` are `tied_aliases`."""
    whole = {**model_state(model), **gathered}
    return whole | {name: whole[first] for name, first in tied.items()}


def has_extra_state(model: torch.nn.Module) -> bool:
    """Whether a module has state besides parameters and buffers."""
    plain = torch.nn.Module.get_extra_state
    return any(type(module).get_extra_state is not plain for module in model.modules())


def _pack(name: str, value: Any) -> Tensor:
    tensors: list[Tensor] = []
    try:
        on_cpu = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
        content = json.dumps(take_apart(on_cpu, tensors)).encode()
    except DataError:
        raise JobError(
            f"model: {name} of its state_dict, from get_extra_state, is a {type(value).__name__} that a "
            f"checkpoint cannot hold; expected tensors, numbers and text, in tuples, lists and dicts"
        ) from None
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    head = _EXTRA_STATE + len(content).to_bytes(8, "little") + content
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *raw])


def is_packed(value: Tensor) -> bool:
    """Whether a tensor of a state is a packed result of `get_extra_state`."""
    head = len(_EXTRA_STATE)
    return (
        value.dtype is torch.uint8
        and value.dim() == 1
        and bytes(value[:head].cpu().numpy().tobytes()) == _EXTRA_STATE
    )


def unpacked(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state with packed extra state unpacked, for `load_state_dict`."""
    return {name: _unpack(value) if is_packed(value) else value for name, value in state.items()}


def _unpack(value: Tensor) -> Any:
    raw = value.cpu().numpy().tobytes()[len(_EXTRA_STATE) :]
    length = int.from_bytes(raw[:8], "little")
    offset = 8 + length

    def tensor(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        nonlocal offset
        size = torch.Size(shape).numel() * dtype.itemsize
        content = bytearray(raw[offset : offset + size])
        offset += size
        return (
            torch.frombuffer(content, dtype=dtype).view(*shape) if size else torch.empty(shape, dtype=dtype)
        )

    return put_together(json.loads(raw[8 : 8 + length]), tensor)


# Optimizers.


def remember_start(optimizer: torch.optim.Optimizer) -> None:
    """Save an optimizer's groups and attributes, so that later changes to them can be detected."""
    if not is_known(optimizer):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        vars(optimizer)[START] = copy.deepcopy((groups, _attributes(optimizer)))


def note_rate(optimizer: torch.optim.Optimizer) -> None:
    """Record the current learning rates as set from outside, not changed by the optimizer."""
    start = vars(optimizer).get(START)
    for group, before in zip(optimizer.param_groups, start[0] if start is not None else ()):
        before["lr"] = group["lr"]


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    known = vars(torch.optim.SGD([torch.nn.Parameter(torch.empty(0))]))
    return {k: v for k, v in vars(optimizer).items() if k not in known and k not in (START, LR_FACTOR)}


def _changed(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the optimizer has changed in each of its groups, and among its attributes."""
    start = vars(optimizer).get(START)
    if start is None:
        return [], {}
    groups = [
        {k: v for k, v in group.items() if k != "params" and not _same(v, before.get(k, optimizer))}
        for group, before in zip(optimizer.param_groups, start[0])
    ]
    return groups, {k: v for k, v in _attributes(optimizer).items() if not _same(v, start[1].get(k, start))}


def changes_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has changed its groups or attributes, besides per-parameter state."""
    groups, attributes = _changed(optimizer)
    return any(groups) or bool(attributes)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(torch.equal(one, other) if isinstance(one, Tensor) else one == other)
    except (TypeError, ValueError, RuntimeError):  # of different types
        return False


def _is_saved(value: Any) -> bool:
    return isinstance(value, (Tensor, bool, int, float))


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Tensors:
    """The optimizer's state as `parameter name/key` -> tensor; numbers become scalars.

    Includes numbers and tensors that the optimizer has changed in its groups or attributes. Parameters
    without a name are skipped: the optimizer of a stage without parameters has a dummy.
    """
    named: Tensors = {}
    groups, attributes = _changed(optimizer)
    state: Mapping[Any, Any] = optimizer.state
    for parameter, values in state.items():
        if isinstance(parameter, Tensor) and parameter in names:
            named |= _named(names[parameter], "", values)
    for changed, group in zip(groups, optimizer.param_groups if groups else ()):
        for parameter in group["params"] if changed or attributes else ():
            if parameter in names:
                named |= _named(names[parameter], _GROUP, changed) | _named(
                    names[parameter], _ATTRIBUTE, attributes
                )
    return named


def _named(name: str, kind: str, values: Mapping[str, Any]) -> Tensors:
    state = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            state[f"{name}/{kind}{key}"] = value.detach().to_dense()
        elif _is_saved(value):
            exact = torch.float64 if isinstance(value, float) else None
            state[f"{name}/{kind}{key}{_NUMBER}"] = torch.tensor(value, dtype=exact)
    return state


def unsaved_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Descriptions of optimizer state that checkpoints do not contain."""
    groups, attributes = _changed(optimizer)
    kept = {f"self.{key} ({type(v).__name__})": v for key, v in attributes.items()}
    kept |= {f"a group's {key!r} ({type(v).__name__})": v for group in groups for key, v in group.items()}
    state: Mapping[Any, Any] = optimizer.state
    for parameter, values in state.items():
        if isinstance(parameter, Tensor):
            kept |= {f"state[p][{k!r}] ({type(v).__name__})": v for k, v in values.items() if v is not None}
        else:
            kept[f"state[{parameter!r}]"] = None
    return [name for name, value in kept.items() if not _is_saved(value)]


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: Tensors
) -> None:
    """Load what `optimizer_state` returned."""
    whole = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # The optimizer of a stage without parameters has a dummy without a name.
    numbers = {names[each]: number for number, each in enumerate(parameters) if each in names}
    whole["state"] = {}
    for name, kind, key, value in _read(state):
        if name not in numbers:
            raise CheckpointError(f"the optimizer's state belongs to another model: it has {name!r}")
        if not kind:
            number = numbers[name]
            whole["state"].setdefault(number, {})[key] = with_same_strides(parameters[number], value)
    load_state_dict(optimizer, whole)
    load_rest(optimizer, names, state)


def load_rest(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: Tensors) -> None:
    """Load the values of groups and attributes from what `optimizer_state` returned."""
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"] if p in names}
    for name, kind, key, value in _read(state):
        if kind == _GROUP and name in groups:
            groups[name][key] = value
        elif kind == _ATTRIBUTE and name in groups:
            setattr(optimizer, key, value)


def _read(state: Tensors) -> Iterator[tuple[str, str, str, Any]]:
    """The entries of an optimizer's state: parameter name, prefix, key, value."""
    for path, tensor in state.items():
        name, _, key = path.rpartition("/")
        kind = next((kind for kind in (_GROUP, _ATTRIBUTE) if key.startswith(kind)), "")
        value = tensor.item() if key.endswith(_NUMBER) else tensor
        yield name, kind, key.removeprefix(kind).removesuffix(_NUMBER), value
