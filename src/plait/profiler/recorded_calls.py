"""What the recorder must know of single calls: their names, what they write, and what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from plait.profiler.trace_errors import current_line, refusal

# torch.nn modules that only contain others, which are the layers.
CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
WRITING_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


def after(value: Tensor, _change: object) -> Tensor:
    """`value` after an operation that wrote to it."""
    return value


def pick(container: Any, key: Any) -> Any:
    """One tensor of the result of a call."""
    return container[key]


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of `module` is one layer: torch's modules are, containers and users' modules are not."""
    return type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, CONTAINERS)


def operation_name(target: Any) -> str:
    """A short name of a node's operation, such as `add`."""
    if isinstance(target, str):
        return target.replace(".", "_")
    name = getattr(target, "__name__", "call")
    owner = getattr(target, "__self__", None)
    if name == "apply" and isinstance(owner, type):
        name = owner.__name__
    return name.strip("_").partition(".")[0].lower()


def writes_first(target: Any) -> bool:
    """Whether a function, by its name, writes to its first argument: `add_`, `x += y`, `x[i] = y`."""
    name = getattr(target, "__name__", "")
    if name.startswith("__"):
        return name in WRITING_OPERATORS
    return name.endswith("_") and not name.startswith("_")


def refuse_hooks(function: Any) -> None:
    """Raise for a call that leaves something at a tensor, which a trace does not have."""
    name = getattr(function, "__name__", "")
    if name == "__set__" and function.__self__ is Tensor.requires_grad:
        return  # requires_grad_ of an input, which changes nothing else
    if name in ("register_hook", "register_post_accumulate_grad_hook", "__set__", "backward"):
        what = "assigns an attribute of a tensor" if name == "__set__" else f"calls {name} inside forward"
        raise refusal(
            f"this {what}", "move it out of forward, or into a torch.autograd.Function", current_line()
        )


def refuse_lost_gradient(node: fx.Node, tensor: Tensor) -> None:
    """Raise for a tensor that requires a gradient only since it was recorded, by code that was not seen."""
    if tensor.requires_grad and not node.meta["requires_grad"] and tensor.grad_fn is not None:
        raise refusal(
            "this uses a tensor whose gradient comes from outside torch's own functions",
            "call torch functions and torch.autograd.Function.apply directly",
            current_line(),
        )


def can_be_bound(result: Any) -> bool:
    """Whether a module's result consists of tensors in known containers."""
    if isinstance(result, (Tensor, type(None))):
        return True
    if isinstance(result, (tuple, list)):
        return all(can_be_bound(part) for part in result)
    if isinstance(result, dict):
        known = type(result) is dict or type(result) in pytree.SUPPORTED_NODES
        return known and all(can_be_bound(part) for part in result.values())
    return False


def container_like(result: Any, parts: dict[str, Any]) -> Any:
    """`parts` in a container like `result`; a dict of a type that pytree can rebuild."""
    if type(result) not in pytree.SUPPORTED_NODES:
        return parts
    node = pytree.SUPPORTED_NODES[type(result)]
    _, context = node.flatten_fn(result)
    return node.unflatten_fn(list(parts.values()), context)


def leads_to(node: fx.Node, value: fx.Node | None, group: int) -> bool:
    """Whether `value` was computed from `node` by operations of `group` only."""
    waiting = [value] if value is not None else []
    while waiting:
        current = waiting.pop()
        if current is node:
            return True
        if current.meta.get("group") == group:
            waiting += current.all_input_nodes
    return False


def storage_of(tensor: Tensor) -> int:
    """What identifies the memory of a tensor, also of a fake one."""
    return int(tensor.untyped_storage()._cdata)


def autocast_state() -> dict[str, tuple[bool, torch.dtype]]:
    """Whether autocast is enabled, and its dtype, by device type."""
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
