"""Writes layers as Python source: the body of a function that computes them.

The same text runs as a stage and is written by `--to-code`. A result reuses the name of its first argument if
that is not needed any more, so that tensors are freed as early as in the model itself.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sympy import Expr, Symbol  # type: ignore[import-untyped]
from torch import fx
from torch.overrides import resolve_name

from plait.profiler.arguments import DeviceArgument, InputValue, SizeArgument
from plait.profiler.recorded_calls import after, pick
from plait.profiler.symbols import write_size
from plait.profiler.trace_errors import TraceError
from plait.profiler.traced_model import Boundary, Layer, TracedModel, is_tensor, size_source

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "floordiv": "//", "mod": "%",
    "pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_RESERVED = frozenset(["self", "torch", "nn", "F", *keyword.kwlist, *dir(builtins)])
_SHORT = ("x", "y", "z", "u", "v", "w", "a", "b", "c", "d")


@dataclass
class Source:
    """The body of a function: `lines`, unindented, that read `inputs` and return a tuple.

    `objects` are the names it uses besides torch, F and self: classes of the user's autograd functions.
    `values` are the inputs, by path, that are numbers or text, not tensors.
    """

    inputs: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    values: frozenset[int] = frozenset()


def write_source(
    traced: TracedModel,
    layers: Sequence[Layer],
    boundary: Boundary,
    own_inputs: bool,
    objects: dict[str, Any] | None = None,
    modules: Collection[str] = (),
) -> Source:
    """The source that computes `layers`; `objects` are named objects that it may use.

    `modules` are the paths of modules that are the model's objects, with all their attributes.

    With `own_inputs` inputs are not written to, and outputs do not change after they were computed: an input
    that is changed in place is copied first (a received tensor is a leaf of autograd, which forbids the
    write).
    """
    return _Writer(traced, layers, boundary, own_inputs, modules).write(objects)


class _Writer:
    def __init__(
        self,
        traced: TracedModel,
        layers: Sequence[Layer],
        boundary: Boundary,
        own_inputs: bool,
        modules: Collection[str],
    ) -> None:
        self._modules = modules
        self._inputs = [traced.node_by_name[name] for name in boundary.inputs]
        self._outputs = [traced.node_by_name[name] for name in boundary.outputs]
        self._nodes = [node for layer in layers for node in layer.nodes]
        self._own_inputs = own_inputs
        self._names: dict[fx.Node, str] = {}
        self._size_givers = self._choose_size_givers()
        self._last_use = self._last_uses()
        self._kept: dict[fx.Node, str] = {}
        self._context = ""

    def write(self, objects: dict[str, Any] | None = None) -> Source:
        names = tuple(self._input_name(node) for node in self._inputs)
        values = frozenset(i for i, node in enumerate(self._inputs) if node.meta.get("python"))
        self._source = Source(names, objects=dict(objects or {}), values=values)
        if self._own_inputs:
            self._copy_changed_inputs()
        for node in self._nodes:
            self._write_node(node)
        self._context = ""
        returned = ", ".join(self._kept.get(node) or self._expression(node) for node in self._outputs)
        self._line(f"return ({returned}{',' if len(self._outputs) == 1 else ''})")
        return self._source

    # Lifetimes of values.

    def _choose_size_givers(self) -> dict[tuple[fx.Node, Symbol | None], tuple[fx.Node, int, int]]:
        """The tensor from which each node reads each size (or, for None, the device) that it needs."""
        chosen: dict[tuple[fx.Node, Symbol | None], tuple[fx.Node, int, int]] = {}
        known = list(self._inputs)
        for node in self._nodes:
            nearest = [*node.all_input_nodes, *reversed(known)]
            for symbol in node.meta.get("symbols", ()):
                source = size_source(symbol, nearest)
                assert source is not None, f"no tensor has the size {symbol} that {node.name} needs"
                chosen[node, symbol] = source
            if node.meta.get("device"):
                chosen[node, None] = (next(value for value in nearest if is_tensor(value)), 0, 1)
            known.append(node)
        return chosen

    def _last_uses(self) -> dict[fx.Node, fx.Node]:
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for used in node.all_input_nodes:
                last[used] = node
        position = {node: i for i, node in enumerate(self._nodes)}
        for (node, _), (giver, _, _) in self._size_givers.items():
            if giver not in last or position[last[giver]] < position[node]:
                last[giver] = node
        return last

    def _ends_at(self, value: fx.Node, node: fx.Node) -> bool:
        return self._last_use.get(value) is node and value not in self._outputs and value.op != "get_attr"

    # Statements.

    def _line(self, text: str) -> None:
        self._source.lines.append(f"    {text}" if self._context else text)

    def _write_node(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self._names[node] = attribute_path(str(node.target), is_module=False, modules=self._modules)
            return
        if node.target is after:
            self._names[node] = self._names[node.args[0]]  # type: ignore[index]
            self._end_values(node)
            return
        self._keep_outputs_that_change(node)
        self._enter_context(node)
        text = self._statement(node)
        ended = self._end_values(node)
        if node in self._last_use or node in self._outputs:
            name = self._names[node] = ended.pop(0) if ended else self._free_name()
            text = f"{name} = {text}"
        self._line(text)
        if ended:
            self._line(f"del {', '.join(ended)}")

    def _statement(self, node: fx.Node) -> str:
        if _is_operator(node, "setitem"):
            target, key, item = node.args
            return f"{self._expression(target)}[{self._index(key, node)}] = {self._expression(item, node)}"
        return self._call(node)

    def _end_values(self, node: fx.Node) -> list[str]:
        """Drop the values whose last use is `node`; returns the names that are free again."""
        wanted = [*node.meta.get("symbols", ()), *([None] if node.meta.get("device") else [])]
        givers = [self._size_givers[node, symbol][0] for symbol in wanted]
        ended = [v for v in dict.fromkeys([*node.all_input_nodes, *givers]) if self._ends_at(v, node)]
        names = dict.fromkeys(self._names.pop(value) for value in ended if value in self._names)
        live = set(self._names.values())
        return [name for name in names if name not in live]

    def _copy_changed_inputs(self) -> None:
        written = {storage for node in self._nodes for storage in node.meta.get("writes", ())}
        for node in self._inputs:
            if node.meta["storage"] in written:
                self._line(f"{self._names[node]} = {self._names[node]}.clone()")

    def _keep_outputs_that_change(self, node: fx.Node) -> None:
        """Copy an output before a later operation of the same stage writes to it."""
        if not self._own_inputs:
            return
        for output in self._outputs:
            made = output in self._names and output not in self._kept
            if made and output.meta["storage"] in node.meta.get("writes", ()):
                self._kept[output] = self._free_name()
                self._context = ""  # the copy needs a gradient even if the write runs under no_grad
                self._line(f"{self._kept[output]} = {self._names[output]}.clone()")

    def _enter_context(self, node: fx.Node) -> None:
        parts = ["torch.no_grad()"] if node.meta["no_grad"] else []
        for device, (enabled, dtype) in node.meta["autocast"].items():
            parts.append(f'torch.autocast("{device}", {dtype}, enabled={enabled})')
        context = ", ".join(parts)
        if context != self._context:
            self._context = ""
            if context:
                self._line(f"with {context}:")
            self._context = context

    def _input_name(self, node: fx.Node) -> str:
        """The value's name, which the caller uses."""
        name = self._names[node] = f"{node.name}_" if node.name in _RESERVED else node.name
        return name

    def _free_name(self) -> str:
        """A short name that is free."""
        live = {*self._names.values(), *self._kept.values()}
        numbered = (f"x{number}" for number in itertools.count(1))
        return next(name for name in itertools.chain(_SHORT, numbered) if name not in live)

    # Expressions.

    def _call(self, node: fx.Node) -> str:
        arguments = [self._expression(item, node) for item in node.args]
        keywords = [f"{key}={self._expression(item, node)}" for key, item in node.kwargs.items()]
        if node.op == "call_module":
            called = attribute_path(str(node.target), is_module=True, modules=self._modules)
            return f"{called}({', '.join(arguments + keywords)})"
        if node.target is pick or _is_operator(node, "getitem"):
            return f"{arguments[0]}[{self._index(node.args[1], node)}]"
        if node.target is getattr:
            return f"{arguments[0]}.{node.args[1]}"
        name = _function_name(node.target)
        if name.startswith("torch.Tensor."):
            return _method_call(name.removeprefix("torch.Tensor."), arguments, keywords)
        if not name.startswith(("torch.", "F.")):
            owner = getattr(node.target, "__self__", None) if "." in name else node.target
            short, dot, rest = name.partition(".")
            name = f"{add_object(self._source.objects, short, owner)}{dot}{rest}"
        return f"{name}({', '.join(arguments + keywords)})"

    def _index(self, key: Any, node: fx.Node | None = None) -> str:
        if isinstance(key, tuple) and key:
            return ", ".join(self._index_part(part, node) for part in key) + ("," if len(key) == 1 else "")
        return self._index_part(key, node)

    def _index_part(self, part: Any, node: fx.Node | None) -> str:
        if not isinstance(part, slice):
            return self._expression(part, node)
        ends = [("" if end is None else self._expression(end, node)) for end in (part.start, part.stop)]
        step = "" if part.step is None else f":{self._expression(part.step, node)}"
        return ":".join(ends) + step

    def _expression(self, item: Any, node: fx.Node | None = None) -> str:
        """`item`, an argument of `node`, as source."""
        if isinstance(item, fx.Node):
            return self._names[item]
        if isinstance(item, SizeArgument):
            return self._size(item.expression, node)
        if isinstance(item, InputValue):
            return self._names[item.node]
        if isinstance(item, DeviceArgument):
            assert node is not None
            return f"{self._names[self._size_givers[node, None][0]]}.device"
        if isinstance(item, (tuple, list)):
            parts = ", ".join(self._expression(part, node) for part in item)
            closing = "," if len(item) == 1 and isinstance(item, tuple) else ""
            return f"[{parts}]" if isinstance(item, list) else f"({parts}{closing})"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{k!r}: {self._expression(v, node)}" for k, v in item.items()) + "}"
        if isinstance(item, slice):
            ends = (item.start, item.stop, item.step)
            return f"slice({', '.join(self._expression(end, node) for end in ends)})"
        if isinstance(item, float) and not math.isfinite(item):
            return f'float("{item}")'
        return repr(item)

    def _size(self, expression: Expr, node: fx.Node | None) -> str:
        assert node is not None

        def symbol(name: Symbol) -> str:
            giver, dim, multiple = self._size_givers[node, name]
            size = f"{self._names[giver]}.shape[{dim}]"
            return size if multiple == 1 else f"({size} // {multiple})"

        text = write_size(expression, symbol)
        if text is None:
            raise TraceError(
                f"the size {expression}, which layer {node.meta['path']!r} computes from the shapes of its "
                f"inputs, cannot be written as Python; expected sums, products, quotients, minima and maxima"
            )
        return text


def attribute_path(path: str, is_module: bool, modules: Collection[str] = ()) -> str:
    """`features.0.conv` as `self.features["0"].conv`; submodules of the root are attributes.

    So are those of `modules`, by path, and of all within them, which are the model's own objects, not dicts.
    """
    text = "self"
    parts = path.split(".") if path else []
    for i, part in enumerate(parts):
        is_within = any(".".join(parts[:end]) in modules for end in range(1, i + 1))
        if part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        elif i > 0 and not is_within and (is_module or i < len(parts) - 1):
            text += f'["{part}"]'
        else:
            text = f'getattr({text}, "{part}")'
    return text


def _is_operator(node: fx.Node, name: str) -> bool:
    return getattr(node.target, "__name__", "") == f"__{name}__"


def _function_name(function: Any) -> str:
    """The name of `function` in Python source."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{function}"
    short: str = getattr(function, "__name__", "")
    for module, prefix in ((torch, "torch"), (F, "F")):
        if getattr(module, short, None) is function:
            return f"{prefix}.{short}"
    name: str | None = resolve_name(function)
    if name is not None and name.startswith("torch."):
        return name
    owner = getattr(function, "__self__", None)
    return f"{owner.__name__}.{short}" if isinstance(owner, type) else short


def _method_call(method: str, arguments: list[str], keywords: list[str]) -> str:
    plain = method.strip("_")
    if not keywords and len(arguments) == 2:
        if method in (plain, f"__{plain}__") and plain in _INFIX:
            return f"{_operand(arguments[0])} {_INFIX[plain]} {_operand(arguments[1])}"
        if method == f"__{plain}__" and plain[0] == "r" and plain[1:] in _INFIX:
            return f"{_operand(arguments[1])} {_INFIX[plain[1:]]} {_operand(arguments[0])}"
    if method in ("__neg__", "__invert__"):
        return f"{'-' if method == '__neg__' else '~'}{arguments[0]}"
    return f"{arguments[0]}.{method}({', '.join(arguments[1:] + keywords)})"


def _operand(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def indent(lines: Iterable[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


def add_object(objects: dict[str, Any], name: str, item: Any) -> str:
    """Add `item` to the objects of the source; returns its name, with a number if that is used already."""
    for number in itertools.count(1):
        candidate = name if number == 1 else f"{name}_{number}"
        if objects.setdefault(candidate, item) is item:
            return candidate
    raise AssertionError("unreachable")
