"""Recording: a model runs once on tensors without values, and every torch call it makes is written down.

A torch.nn module is one call, run later by the module itself, so that dropout, BatchNorm, fused LSTMs,
hooks and train/eval behave as they always do. Between modules the recorder sees torch functions as the
model's source calls them. torch.export, the alternative, would lower everything to aten operations with
the training flag and the device written in, and drop the backward of a torch.autograd.Function.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from plait.profiler.arguments import TrainingArgument, leaves, lower
from plait.profiler.failures import current_line, refusal
from plait.profiler.symbols import recurrent_shapes, shape_of

# torch.nn modules that only arrange others: the layers are inside.
CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
_WRITING_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


def after(value: Tensor, _change: object) -> Tensor:
    """`value` as it is once an operation that wrote into it has run."""
    return value


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of `module` is one layer: torch's own modules are, those built from them are not."""
    return type(module).__module__.startswith("torch.nn.modules") and not isinstance(module, CONTAINERS)


class Recorder(TorchFunctionMode):
    """Writes the torch calls of one forward pass of `model` into `graph`.

    A node's meta holds: `group`, equal for nodes of one layer; `path`, its module; `shape`, `dtype`,
    `requires_grad` and `storage` of a tensor; `writes`, the storages it changes in place; `symbols`, those
    its sizes are made of; `device`, whether it asks for one; `no_grad` and `autocast`, where it runs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self._attributes = dict(_named_tensors(model))
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._values: dict[int, fx.Node] = {}
        self._kept: list[object] = []  # an object that lives keeps its id for itself
        # Of each storage written into: when, by which node, and the value it was written through.
        self._written: dict[int, tuple[int, fx.Node, fx.Node | None]] = {}
        self._modules: list[tuple[nn.Module, str, int]] = [(model, "", 1)]
        self._calls: Counter[str] = Counter()
        self._group = 0
        self._group_key: object = None
        self._silent = 0
        self._thread = threading.get_ident()
        self._autocast = _autocast_state()

    # What the trace tells the recorder.

    def replace_tensors(self, model: nn.Module, mode: FakeTensorMode) -> None:
        """Let `model` run on parameters and buffers without values; whoever calls puts its own back."""
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for holder in holders:
                for name, tensor in holder.items():
                    if tensor is not None:
                        stand_in = mode.from_tensor(tensor, static_shapes=True)  # tied ones get the same
                        self._attributes[id(stand_in)] = self._attributes[id(tensor)]
                        self._kept.append(stand_in)
                        holder[name] = stand_in

    def add_input(self, name: str, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        self._describe(node, tensor)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made `tensor`; a parameter, buffer or constant gets a node of its own."""
        node = self._values.get(id(tensor))
        if node is not None:
            return self._current(node, tensor)
        name = self._attributes.get(id(tensor))
        if name is None:
            if isinstance(tensor, FakeTensor):
                raise refusal(
                    "this uses a tensor that came from outside torch's own functions",
                    "call torch functions directly (no torch.jit.script, torch.vmap or C extension)",
                    current_line(),
                )
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            self._attributes[id(tensor)] = name
            self._kept.append(tensor)
        node = self._create("get_attr", name, (), {})
        node.meta |= {"shape": tuple(tensor.shape), "dtype": tensor.dtype}
        node.meta |= {"requires_grad": tensor.requires_grad, "storage": _storage(tensor)}
        return node

    # What torch tells the recorder.

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_silent():
            return function(*args, **kwargs)
        _refuse_hooks(function)
        return self._observe(function, args, kwargs, lambda: function(*args, **kwargs))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record while inside: torch functions, calls of modules, and torch.autograd.Function."""
        call, assign = nn.Module.__call__, nn.Module.__setattr__
        apply = torch.autograd.Function.__dict__["apply"]
        recorder = self

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._call_module(call, module, args, kwargs)

        def recorded_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            original = apply.__get__(None, cls)
            if recorder._is_silent():
                return original(*args, **kwargs)
            if cls is CheckpointFunction:  # what to recompute is a schedule's choice, not the model's
                function, _, *inputs = args
                return function(*inputs)
            return recorder._observe(original, args, kwargs, lambda: original(*args, **kwargs))

        def recorded_assignment(module: nn.Module, name: str, value: Any) -> None:
            if not recorder._assign_buffer(module, name, value):
                assign(module, name, value)

        # torch's encoder compares a mask's values to see whether it is causal, only to save time.
        detect, transformer._detect_is_causal_mask = transformer._detect_is_causal_mask, _is_said_causal
        nn.Module.__call__ = recorded_call  # type: ignore[method-assign]
        nn.Module.__setattr__ = recorded_assignment  # type: ignore[method-assign, assignment]
        torch.autograd.Function.apply = classmethod(recorded_apply)  # type: ignore[assignment]
        try:
            with self:
                yield
        finally:
            transformer._detect_is_causal_mask = detect
            nn.Module.__call__ = call  # type: ignore[method-assign]
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    def _is_silent(self) -> bool:
        """Inside a call that is being recorded as one, or on another job's thread."""
        return self._silent > 0 or threading.get_ident() != self._thread

    def _assign_buffer(self, module: nn.Module, name: str, value: Any) -> bool:
        """Record `self.buffer = value` as a write into the buffer; False where it is no such thing."""
        buffer = module.__dict__.get("_buffers", {}).get(name)
        if self._is_silent() or not isinstance(buffer, Tensor) or not isinstance(value, Tensor):
            return False
        if _storage(value) == _storage(buffer):
            return True  # `self.buffer += 1` assigns what it has written into
        if value.requires_grad and torch.is_grad_enabled():
            raise refusal(
                f"this assigns a tensor with a gradient to the buffer {name!r}",
                "assign value.detach(), and keep the tensor itself in a variable",
                current_line(),
            )
        with torch.no_grad():
            buffer.copy_(value)
        return True

    def _call_module(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is None or self._is_silent():
            return call(module, *args, **kwargs)
        self._calls[path] += 1
        self._modules.append((module, path, self._calls[path]))
        try:
            if path and is_leaf(module):
                if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                    return self._observe(
                        path, args, kwargs, lambda: recurrent_shapes(module, *args, **kwargs)
                    )
                return self._observe(path, args, kwargs, lambda: call(module, *args, **kwargs))
            return call(module, *args, **kwargs)
        finally:
            self._modules.pop()

    def _observe(self, target: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a call and write it down when it made a tensor or changed one."""
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        self._silent += 1
        try:
            result = run()
        finally:
            self._silent -= 1
        changed = [t for t, version in zip(tensors, versions) if t._version != version]
        makes = any(isinstance(leaf, Tensor) for leaf in leaves(result))
        if not makes and not changed and not _writes(target):
            return result
        node = self._record(target, args, kwargs)
        when = len(self._kept)
        for tensor in changed:
            self._note_change(when, node, tensor, returned=tensor is result)
        return self._bind(node, result, {id(tensor) for tensor in tensors} - {id(t) for t in changed})

    def _record(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        kind = "call_module" if isinstance(target, str) else "call_function"
        self._enter_group(alone=kind == "call_module")
        meta: dict[str, Any] = {}
        if getattr(target, "__name__", "") == "__get__":  # a property of a tensor
            target, args = getattr, (*args[:1], target.__self__.__name__)
        lowered = lower(args, self.node_of, meta)
        lowered_kwargs = {
            key: TrainingArgument() if self._is_training_flag(key, item) else lower(item, self.node_of, meta)
            for key, item in kwargs.items()
        }
        node = self._create(kind, target, lowered, lowered_kwargs)
        node.meta |= meta
        if _writes(target):
            node.meta["writes"] = tuple(arg.meta["storage"] for arg in node.all_input_nodes[:1])
        return node

    def _enter_group(self, alone: bool) -> None:
        """A module's call is a layer alone; functions called one after another by one module are another."""
        _, path, number = self._modules[-1]
        key = object() if alone else (path, number)
        if key != self._group_key:
            self._group += 1
            self._group_key = key

    def _create(self, kind: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        name = args[1].lower() if target is getattr else operation_name(target)
        node = self.graph.create_node(kind, target, args, kwargs, name=name)
        node.meta |= {"group": self._group, "path": self._modules[-1][1]}
        node.meta |= {"no_grad": not torch.is_grad_enabled(), "autocast": self._changed_autocast()}
        return node

    def _changed_autocast(self) -> dict[str, tuple[bool, torch.dtype]]:
        """Where the model itself switched autocast, by device type."""
        now = _autocast_state()
        return {device: state for device, state in now.items() if state != self._autocast[device]}

    def _is_training_flag(self, key: str, item: object) -> bool:
        return key == "training" and item is self._modules[-1][0].training

    # Arguments and results.

    def _bind(self, node: fx.Node, result: Any, unchanged: set[int]) -> Any:
        """Let `node` stand for the tensors of `result`; returns the result the model goes on with."""
        if isinstance(result, Tensor):
            if id(result) in unchanged or id(result) in self._attributes:
                # The same object came back (`x.contiguous()`): without a new one, later uses of the
                # argument could not be told from uses of the result.
                result = self._fresh(result)
            self._describe(node, result)
            return result
        if isinstance(result, (tuple, list)):
            parts = [self._bind_item(node, i, part, unchanged) for i, part in enumerate(result)]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        if isinstance(result, dict):
            return {key: self._bind_item(node, key, part, unchanged) for key, part in result.items()}
        return result

    def _bind_item(self, node: fx.Node, key: Any, part: Any, unchanged: set[int]) -> Any:
        if not any(isinstance(leaf, Tensor) for leaf in leaves(part)):
            return part
        item = self.graph.create_node("call_function", pick, (node, key), {}, name=f"{node.name}_{key}")
        item.meta |= {key: node.meta[key] for key in ("group", "path", "no_grad", "autocast")}
        return self._bind(item, part, unchanged)

    def _fresh(self, tensor: Tensor) -> Tensor:
        self._silent += 1
        try:
            return torch.ops.aten.alias(tensor)  # type: ignore[no-any-return]
        finally:
            self._silent -= 1

    def _describe(self, node: fx.Node, tensor: Tensor) -> None:
        node.meta |= {
            "shape": shape_of(tensor),
            "dtype": tensor.dtype,
            "requires_grad": tensor.requires_grad,
            "storage": _storage(tensor),
            "since": len(self._kept),
        }
        self._values[id(tensor)] = node
        self._kept.append(tensor)

    # Changes in place.

    def _note_change(self, when: int, node: fx.Node, tensor: Tensor, returned: bool) -> None:
        storage = _storage(tensor)
        before = self._values.get(id(tensor))
        node.meta["writes"] = (*node.meta.get("writes", ()), storage)
        self._written[storage] = (when, node, before)
        if not returned and before is not None:
            self._describe(self._create("call_function", after, (before, node), {}), tensor)

    def _current(self, node: fx.Node, tensor: Tensor) -> fx.Node:
        """The node that stands for `tensor` now, if a write through a view has changed it since `node`.

        The view must have been made from it in the layer of the write: what is cut apart shares no memory.
        """
        when, write, view = self._written.get(_storage(tensor), (0, node, None))
        if when <= node.meta["since"]:
            return node
        if node.meta["group"] != write.meta["group"] and not _leads_to(node, view, write.meta["group"]):
            raise refusal(
                "this uses a tensor that was changed in place through a view of it in another layer",
                "let the operation return a new tensor (add in place of add_), or clone the view first",
                current_line(),
            )
        with self.graph.inserting_after(write):
            changed = self.graph.call_function(after, (node, write))
        changed.meta |= {key: write.meta[key] for key in ("group", "path", "no_grad", "autocast")}
        self._describe(changed, tensor)
        return changed


def _leads_to(node: fx.Node, value: fx.Node | None, group: int) -> bool:
    """Whether `value` was made from `node` by operations of `group` alone."""
    waiting = [value] if value is not None else []
    while waiting:
        found = waiting.pop()
        if found is node:
            return True
        if found.meta.get("group") == group:
            waiting += found.all_input_nodes
    return False


def pick(container: Any, key: Any) -> Any:
    """One tensor of what a call returned."""
    return container[key]


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _named_tensors(model: nn.Module) -> Iterator[tuple[int, str]]:
    # Reversed, so that of a tied parameter the first name stays.
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return ((id(tensor), name) for name, tensor in reversed(named))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _autocast_state() -> dict[str, tuple[bool, torch.dtype]]:
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}


def _writes(target: Any) -> bool:
    """Whether a function, by its name, changes its first argument: `add_`, `x += y`, `x[i] = y`."""
    name = getattr(target, "__name__", "")
    if name.startswith("__"):
        return name in _WRITING_OPERATORS
    return name.endswith("_") and not name.startswith("_")


def _refuse_hooks(function: Any) -> None:
    name = getattr(function, "__name__", "")
    if name == "__set__" and function.__self__ is Tensor.requires_grad:
        return  # asks for the gradient of an input, which changes no other
    if name in ("register_hook", "register_post_accumulate_grad_hook", "__set__", "backward"):
        what = "assigns an attribute of a tensor" if name == "__set__" else f"calls {name} inside forward"
        raise refusal(
            f"this {what}", "move it out of forward, or into a torch.autograd.Function", current_line()
        )


def operation_name(target: Any) -> str:
    """A word for what a node does, such as `add`."""
    if isinstance(target, str):
        return target.replace(".", "_")
    name = getattr(target, "__name__", "call")
    owner = getattr(target, "__self__", None)
    if name == "apply" and isinstance(owner, type):
        name = owner.__name__
    return name.strip("_").partition(".")[0].lower()
