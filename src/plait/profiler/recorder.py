"""Records the torch calls of one forward of a model on fake tensors.

A call of a torch.nn module is recorded as one call and later run by the module itself, so that dropout,
BatchNorm, fused LSTMs and hooks behave as usual; so is each of the user's modules that stays whole. Between
modules the recorder sees torch functions as the model's source calls them. torch.export, the alternative,
would lower everything to aten operations with a fixed device, and drop the backward of a
torch.autograd.Function.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from plait.data.generators import GENERATORS, kept_generators
from plait.profiler.arguments import can_be_lowered, leaves, lower
from plait.profiler.recorded_calls import (
    after,
    autocast_state,
    can_be_bound,
    container_like,
    is_leaf,
    leads_to,
    operation_name,
    pick,
    refuse_hooks,
    refuse_lost_gradient,
    storage_of,
    writes_first,
)
from plait.profiler.symbols import Sizes, is_lstm, lstm_shapes, recurrent_shapes, shape_of
from plait.profiler.trace_errors import SourceLine, current_line, refusal
from plait.profiler.watched_values import watch

_BELOW: dict[str, Callable[[float, float], bool]] = {"lt": operator.lt, "ge": operator.ge}


@dataclass(frozen=True)
class CodeLocation:
    """Where a layer's code is in the model, equal in every trace.

    `path` and `call` identify the call of a module, `index` counts the modules that this call has called
    before, and `within` are the enclosing calls, as pairs of path and call.
    """

    path: str
    call: int
    index: int
    within: tuple[tuple[str, int], ...]


class MustOpen(Exception):
    """A module cannot be recorded as one call, because of its arguments, results or shared state."""

    def __init__(self, paths: Collection[str]) -> None:
        super().__init__(", ".join(sorted(paths)))
        self.paths = frozenset(paths)


@dataclass
class _Call:
    """A running call of a module; `children` counts the modules that it has called."""

    module: nn.Module
    path: str
    number: int
    children: int = 0


class CallRecorder(TorchFunctionMode):
    """Records the torch calls of one forward pass of `model` in `graph`.

    The modules whose paths are in `whole` are one call each; raises MustOpen if that is impossible.
    `constants` are tensors that have names already.

    A node's meta contains: `group`, equal for nodes of one layer; `path`, its module; `shape`, `dtype`,
    `requires_grad` and `storage` of a tensor; `writes`, the storages that it changes in place; `symbols` of
    its sizes; `device`, whether it uses one; `no_grad` and `autocast`, the modes it runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        sizes: Sizes | None = None,
        whole: Collection[str] = (),
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = dict(constants or {})
        self.locations: dict[int, CodeLocation] = {}
        # Modules whose code was recorded, and the line that read a size which the trace fixes.
        self.opened: dict[str, nn.Module] = {"": model}
        # Input values, by name, that the code of traced modules depends on, with the first such module.
        self.looked_at: dict[str, str] = {}
        self.size_read: SourceLine | None = None
        self._sizes = sizes
        self.whole = frozenset(whole)
        # Tensors that the running whole module may use, and the whole module that made each other tensor.
        self._known: set[int] | None = None
        self._running = ""
        self._made_in: dict[int, str] = {}
        # Storages that were written in place by any code; and the whole modules that use one of `left`, the
        # tensors that an earlier forward has left behind.
        self.written_in: set[int] = set()
        self.left: dict[int, Tensor] = {}
        self.using_left: set[str] = set()
        # Random numbers in [0, 1), and comparisons of them whose result does not depend on the number.
        self._uniform: set[int] = set()
        self._decided: dict[int, bool] = {}
        self._attributes = {id(tensor): name for name, tensor in self.constants.items()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._attributes |= {id(tensor): name for name, tensor in named}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._values: dict[int, fx.Node] = {}
        self._kept: list[object] = []  # kept alive so that ids are not reused
        # For each written storage: when, by which node, and the value through which it was written.
        self._written: dict[int, tuple[int, fx.Node, fx.Node | None]] = {}
        # Tensors to which the call being recorded adds a gradient, by writing to them.
        self._gaining: set[int] = set()
        self._modules = [_Call(model, "", 1)]
        self._calls: Counter[str] = Counter()
        self._group = 0
        self._group_key: object = None
        self._silent = 0
        self._thread = threading.get_ident()
        self._autocast = autocast_state()

    # Called by the trace.

    def replace_tensors(self, model: nn.Module, mode: FakeTensorMode) -> None:
        """Replace the parameters and buffers of `model` by fake ones; the caller restores them."""
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for holder in holders:
                for name, tensor in holder.items():
                    if tensor is not None:
                        stand_in = mode.from_tensor(
                            tensor, static_shapes=True
                        )  # tied tensors get the same fake
                        self._attributes[id(stand_in)] = self._attributes[id(tensor)]
                        self._kept.append(stand_in)
                        holder[name] = stand_in

    def follow(self, other: CallRecorder, left: Iterable[Tensor] = ()) -> None:
        """Use the parameters and buffers of a model whose tensors `other` has replaced.

        `left` are tensors that its forward has left behind.
        """
        self._attributes |= other._attributes
        self.left = {id(tensor): tensor for tensor in left if id(tensor) not in self._attributes}

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a forward wrote to the storage of `tensor`, a parameter, buffer or constant."""
        return storage_of(tensor) in self.written_in

    def add_input(self, name: str, tensor: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        self._describe(node, tensor)
        return node

    def add_value(self, name: str, value: Any) -> Any:
        """Add a number or text among the inputs, which calls may take; `looked_at` records who reads it."""
        node = self.graph.placeholder(name)
        node.meta |= {"python": True, "shape": (1,), "dtype": torch.uint8, "requires_grad": False}
        node.meta |= {"storage": -1, "since": 0}
        watched = watch(value, functools.partial(self._note_look, node.name))
        watched.node = node
        return watched

    def _note_look(self, name: str) -> None:
        # A call that is recorded as one uses the value of each batch.
        if not self._is_silent():
            self.looked_at.setdefault(name, self._modules[-1].path)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node of `tensor`; a new node for a parameter, buffer or constant."""
        node = self._values.get(id(tensor))
        if node is not None:
            if id(tensor) not in self._gaining:
                refuse_lost_gradient(node, tensor)
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
        node.meta |= {"requires_grad": tensor.requires_grad, "storage": storage_of(tensor)}
        return node

    # Called by torch.

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") == "__bool__" and id(args[0]) in self._decided:
            return self._decided[id(args[0])]
        run = lstm_shapes if is_lstm(function, args) else function
        if self._is_silent():
            versions = [(leaf, leaf._version) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            result = run(*args, **kwargs)
            self._note_writes(function, versions)
            self._watch_inside(args, kwargs, result)
        else:
            refuse_hooks(function)
            self._note_size_read(function, args)
            result = self._observe(function, args, kwargs, lambda: run(*args, **kwargs))
        self._decide(function, args, result)
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context that records torch functions, calls of modules, and torch.autograd.Function."""
        call, assign = nn.Module.__call__, nn.Module.__setattr__
        recorder = self

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._call_module(call, module, args, kwargs)

        def recorded_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == recorder._thread and cls is CheckpointFunction:
                # Recomputation is chosen by the schedule, not by the model.
                function, _, *inputs = args
                return function(*inputs)
            original = torch._C._FunctionBase.__dict__["apply"].__get__(None, cls)
            if recorder._is_silent():
                return original(*args, **kwargs)
            return recorder._observe(cls.apply, args, kwargs, lambda: original(*args, **kwargs))

        def recorded_assignment(module: nn.Module, name: str, value: Any) -> None:
            if not recorder._assign_buffer(module, name, value):
                assign(module, name, value)

        # torch's encoder reads a mask's values to see whether it is causal, only as an optimization.
        detect, transformer._detect_is_causal_mask = transformer._detect_is_causal_mask, _is_said_causal
        nn.Module.__call__ = recorded_call  # type: ignore[method-assign]
        nn.Module.__setattr__ = recorded_assignment  # type: ignore[method-assign, assignment]
        # Below Function.apply, to which the user may have kept a reference: `swish = Swish.apply`.
        SingleLevelFunction.apply = classmethod(recorded_apply)  # type: ignore[attr-defined]
        try:
            with self:
                yield
        finally:
            transformer._detect_is_causal_mask = detect
            nn.Module.__call__ = call  # type: ignore[method-assign]
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]
            del SingleLevelFunction.apply  # type: ignore[attr-defined]

    def _is_silent(self) -> bool:
        """Whether it is inside a call that is recorded as one, or on another thread."""
        return self._silent > 0 or threading.get_ident() != self._thread

    def _assign_buffer(self, module: nn.Module, name: str, value: Any) -> bool:
        """Record `self.buffer = value` as a write to the buffer; returns False if it is not one."""
        buffer = module.__dict__.get("_buffers", {}).get(name)
        if self._is_silent() or not isinstance(buffer, Tensor) or not isinstance(value, Tensor):
            return False
        if storage_of(value) == storage_of(buffer):
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
        if path is None or threading.get_ident() != self._thread:
            return call(module, *args, **kwargs)
        self._calls[path] += 1
        if self._silent > 0:
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                return recurrent_shapes(module, *args, **kwargs)
            return call(module, *args, **kwargs)
        self._modules.append(_Call(module, path, self._calls[path]))
        try:
            return self._call_one(call, module, path, args, kwargs)
        finally:
            self._modules.pop()
            if self._modules:
                self._modules[-1].children += 1

    def _call_one(self, call: Any, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        if path and is_leaf(module):
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                return self._observe(path, args, kwargs, lambda: recurrent_shapes(module, *args, **kwargs))
            return self._observe(path, args, kwargs, lambda: call(module, *args, **kwargs))
        if path in self.whole:
            return self._call_whole(call, module, path, args, kwargs)
        self.opened[path] = module
        return call(module, *args, **kwargs)

    def _call_whole(self, call: Any, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Record a call of a user's module as one call, if its arguments and results allow it."""
        if not can_be_lowered((args, kwargs)):
            raise MustOpen({path})

        def run() -> Any:
            result = call(module, *args, **kwargs)
            if not can_be_bound(result):
                raise MustOpen({path})
            return result

        self._known = {id(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._running = path
        try:
            with kept_generators(*GENERATORS[1:]):  # its draws in Python happen when it runs
                return self._observe(path, args, kwargs, run)
        finally:
            self._known = None

    def _note_writes(self, function: Any, versions: list[tuple[Tensor, int]]) -> None:
        """Record the storages that a call within a whole module has written; `versions` are from before."""
        if threading.get_ident() != self._thread:
            return
        self.written_in |= {storage_of(tensor) for tensor, before in versions if tensor._version != before}
        if getattr(function, "__name__", "") == "__set__" and function.__self__ is not Tensor.requires_grad:
            self.written_in |= {storage_of(tensor) for tensor, _ in versions[:1]}

    def _watch_inside(self, args: Any, kwargs: Any, result: Any) -> None:
        """Check that a whole module uses only its arguments: other modules may run on another worker."""
        if self._known is None or threading.get_ident() != self._thread:
            return
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._known and id(leaf) not in self._attributes:
                if id(leaf) in self.left:
                    self.using_left.add(self._running)
                if id(leaf) in self._values:
                    raise MustOpen({self._running})
                if self._made_in.get(id(leaf), self._running) != self._running:
                    raise MustOpen({self._running, self._made_in[id(leaf)]})
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._attributes:
                self._known.add(id(leaf))
                self._made_in[id(leaf)] = self._running
                self._kept.append(leaf)

    def _decide(self, function: Any, args: Any, result: Any) -> None:
        """Evaluate `torch.rand(()) < p` if p is 0 or 1, as in stochastic depth."""
        name = getattr(function, "__name__", "").strip("_")
        if name == "rand" and isinstance(result, Tensor) and result.dim() == 0:
            self._uniform.add(id(result))
            self._kept.append(result)
            if id(result) in self._values:
                # The unused draw is kept, so that later draws stay the same.
                self._values[id(result)].meta["writes"] = ()
        elif name in _BELOW and len(args) == 2 and id(args[0]) in self._uniform:
            limit = args[1]
            if isinstance(limit, (int, float)) and not 0 < limit < 1:
                self._decided[id(result)] = _BELOW[name](0.5, limit)
                self._kept.append(result)

    def _note_size_read(self, function: Any, args: Any) -> None:
        """Record the first line that reads a size which is a number in this trace."""
        if self.size_read is not None or not args or not isinstance(args[0], Tensor):
            return
        name = getattr(function, "__name__", "")
        if name in ("size", "__len__", "numel") or (
            name == "__get__" and getattr(function.__self__, "__name__", "") == "shape"
        ):
            sizes: list[Any] = list(args[0].shape)
            read = [sizes[args[1]]] if name == "size" and len(args) > 1 else sizes
            if any(isinstance(size, int) for size in read):
                self.size_read = current_line()

    def _observe(self, target: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a call, and record it if it created or changed a tensor."""
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        without = [tensor for tensor in tensors if not tensor.requires_grad]
        with self._in_silence():
            result = run()
        changed = [t for t, version in zip(tensors, versions) if t._version != version]
        makes = any(isinstance(leaf, Tensor) for leaf in leaves(result))
        if not makes and not changed and not writes_first(target):
            return result
        # `out = zeros_like(x); out[i] = y`: this call makes the tensor require a gradient.
        self._gaining = {id(t) for t in without if t.requires_grad and any(t is one for one in changed)}
        node = self._record(target, args, kwargs)
        self._gaining = set()
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
        lowered_kwargs = {key: lower(item, self.node_of, meta) for key, item in kwargs.items()}
        node = self._create(kind, target, lowered, lowered_kwargs)
        node.meta |= meta
        if writes_first(target):
            node.meta["writes"] = tuple(arg.meta["storage"] for arg in node.all_input_nodes[:1])
            self.written_in.update(node.meta["writes"])
        return node

    def _enter_group(self, alone: bool) -> None:
        """Begin a layer: a module's call, or the consecutive function calls of one module."""
        call = self._modules[-1]
        key = object() if alone else (call.path, call.number)
        if key != self._group_key:
            self._group += 1
            self._group_key = key
            within = tuple((each.path, each.number) for each in self._modules[1:])
            self.locations[self._group] = CodeLocation(call.path, call.number, call.children, within)

    def _create(self, kind: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        name = args[1].lower() if target is getattr else operation_name(target)
        node = self.graph.create_node(kind, target, args, kwargs, name=name)
        node.meta |= {"group": self._group, "path": self._modules[-1].path}
        node.meta |= {"no_grad": not torch.is_grad_enabled(), "autocast": self._changed_autocast()}
        return node

    def _changed_autocast(self) -> dict[str, tuple[bool, torch.dtype]]:
        """The autocast settings that the model itself has changed, by device type."""
        now = autocast_state()
        return {device: state for device, state in now.items() if state != self._autocast[device]}

    # Arguments and results.

    def _bind(self, node: fx.Node, result: Any, unchanged: set[int]) -> Any:
        """Bind `node` to the tensors of `result`; returns the result that the model continues with."""
        if isinstance(result, Tensor):
            if id(result) in unchanged or id(result) in self._attributes:
                # The same object was returned (`x.contiguous()`): without a new one, later uses of the
                # argument could not be distinguished from uses of the result.
                result = self._fresh(result)
            self._describe(node, result)
            return result
        if isinstance(result, (tuple, list)):
            parts = [self._bind_item(node, i, part, unchanged) for i, part in enumerate(result)]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        if isinstance(result, dict):
            bound = {key: self._bind_item(node, key, part, unchanged) for key, part in result.items()}
            return bound if type(result) is dict else container_like(result, bound)
        return result

    def _bind_item(self, node: fx.Node, key: Any, part: Any, unchanged: set[int]) -> Any:
        if not any(isinstance(leaf, Tensor) for leaf in leaves(part)):
            return part
        item = self.graph.create_node("call_function", pick, (node, key), {}, name=f"{node.name}_{key}")
        item.meta |= {key: node.meta[key] for key in ("group", "path", "no_grad", "autocast")}
        return self._bind(item, part, unchanged)

    def _fresh(self, tensor: Tensor) -> Tensor:
        with self._in_silence():
            return torch.ops.aten.alias(tensor)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _in_silence(self) -> Iterator[None]:
        self._silent += 1
        if self._sizes is not None:
            self._sizes.silent += 1
        try:
            yield
        finally:
            self._silent -= 1
            if self._sizes is not None:
                self._sizes.silent -= 1

    def _describe(self, node: fx.Node, tensor: Tensor) -> None:
        node.meta |= {
            "shape": shape_of(tensor),
            "dtype": tensor.dtype,
            "requires_grad": tensor.requires_grad,
            "storage": storage_of(tensor),
            "since": len(self._kept),
        }
        self._values[id(tensor)] = node
        self._kept.append(tensor)

    # Changes in place.

    def _note_change(self, when: int, node: fx.Node, tensor: Tensor, returned: bool) -> None:
        storage = storage_of(tensor)
        self.written_in.add(storage)
        before = self._values.get(id(tensor))
        node.meta["writes"] = (*node.meta.get("writes", ()), storage)
        self._written[storage] = (when, node, before)
        if not returned and before is not None:
            self._describe(self._create("call_function", after, (before, node), {}), tensor)

    def _current(self, node: fx.Node, tensor: Tensor) -> fx.Node:
        """The current node of `tensor`, if a write through a view has changed it since `node`.

        The view must have been made from it in the layer of the write, as stages do not share memory.
        """
        when, write, view = self._written.get(storage_of(tensor), (0, node, None))
        if when <= node.meta["since"]:
            return node
        if node.meta["group"] != write.meta["group"] and not leads_to(node, view, write.meta["group"]):
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


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
