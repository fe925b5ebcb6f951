"""A traced model: its operations in order, grouped into layers, and the values between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from sympy import Expr, Symbol
from torch import fx, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.profiler.arguments import packed_value
from plait.profiler.recorder import CodeLocation
from plait.profiler.symbols import Branch, Shape
from plait.profiler.trace_errors import FIXED_SHAPES, SourceLine, TraceError


@dataclass(frozen=True)
class Value:
    """A tensor between layers. A size that depends on the batch is an expression of symbols."""

    name: str
    shape: Shape
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Layer:
    """Operations that stay together: one call of a torch.nn module, or the functions between two such calls.

    `id` is the module's path; a second call of the same module is `path@2`. `parameters` and `buffers` are
    the names in the original model; for a tied parameter, its first name. `location` is equal in every trace
    of the model.
    """

    id: str
    description: str
    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    location: CodeLocation = field(default_factory=lambda: CodeLocation("", 1, 0, ()))


@dataclass(frozen=True)
class Concern:
    """Something in a module's code that a trace cannot reproduce."""

    path: str
    message: str


@dataclass(frozen=True)
class KeptState:
    """Python state that forwards of the whole modules at `paths` change together.

    It is correct if one worker runs all of them, and all microbatches.
    """

    paths: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class FixedValue:
    """An input value that the code of the traced module at `path`, of that class, depends on."""

    value: Any
    path: str
    kind: str

    def describe(self, where: str, found: Any) -> str:
        """Why the input at `where` must not have another value."""
        owner = f"{self.path} ({self.kind})" if self.path else self.kind
        return (
            f"found {found!r} at {where} of a batch's inputs, where the trace had {self.value!r}, and the "
            f"code of {owner} depends on it; give it as a tensor, or use it in a module that no cut divides"
        )


@dataclass(frozen=True)
class Guards:
    """What the trace has fixed about the sizes of the inputs.

    `shapes` are those of the inputs, with symbols in free dimensions. `size_read` is a line of the model that
    reads a size which is a number in them; without it, such sizes may change. `fixed` are sizes that the
    model's operations fixed to numbers, and `branches` those that its code took.
    """

    shapes: tuple[Shape, ...] = ()
    size_read: SourceLine | None = None
    fixed: tuple[tuple[Symbol, int, SourceLine | None], ...] = ()
    branches: tuple[Branch, ...] = ()

    def broken_by(self, shapes: Sequence[Sequence[int]]) -> str | None:
        """Why the trace is not valid for inputs of these shapes; None if it is."""
        sizes: dict[Symbol, int] = {}
        for traced, shape in zip(self.shapes, shapes):
            if len(traced) != len(shape):
                return f"found an input of {len(shape)} dimensions, where the trace had {len(traced)}"
            for dim, (known, size) in enumerate(zip(traced, shape)):
                if isinstance(known, Symbol) and sizes.setdefault(known, size) != size:
                    return f"found sizes {sizes[known]} and {size}, which were equal in the trace"
                if isinstance(known, int) and size != known and self.size_read is not None:
                    return (
                        f"found size {size} in dimension {dim} of an input, where the trace had {known}, "
                        f"and the model reads sizes ({self.size_read})"
                    )
        for symbol, size, line in self.fixed:
            if sizes.get(symbol, size) != size:
                return f"found size {sizes[symbol]} in an input, which the trace has fixed at {size} ({line})"
        for branch in self.branches:
            if branch.holds.subs(sizes) == sympy.false:
                return (
                    f"with these sizes the model would take another branch than in the trace ({branch.line})"
                )
        return None


@dataclass(frozen=True)
class Boundary:
    """The inputs and outputs of a set of layers: names of values in the order of computation."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TracedModel:
    """Layers in the order of execution, over the parameters of `model`.

    Nodes refer to modules, parameters and buffers of `model` by path; `constants` are tensors that are
    neither. `inputs` and `outputs` are names of values; `output_spec` rebuilds the model's output from the
    latter (what is neither a tensor nor a plain value becomes None).
    """

    model: nn.Module
    graph: fx.Graph
    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_leaves: tuple[Any, ...]
    output_spec: pytree.TreeSpec
    constants: dict[str, torch.Tensor]
    # The path of each of `inputs` in the arguments of the model, see `inputs_by_path`: tensors first, then
    # numbers and text that calls take. `fixed_values` are values that must not change, by path.
    input_paths: tuple[str, ...] = ()
    fixed_values: Mapping[str, FixedValue] = field(default_factory=dict)
    # Modules that are one layer each, besides torch's.
    whole: frozenset[str] = frozenset()
    guards: Guards = field(default_factory=Guards)
    # What traced modules do that a trace cannot reproduce.
    concerns: tuple[Concern, ...] = ()
    # Buffers, parameters and constants that forward writes, by first name.
    written: frozenset[str] = frozenset()
    # State that whole modules keep between forwards.
    kept: tuple[KeptState, ...] = ()
    # The same model in evaluation mode, or the reason why it cannot be traced; neither if this is that trace.
    evaluation: TracedModel | None = None
    no_evaluation: str | None = None

    @cached_property
    def homes(self) -> dict[str, str]:
        """The layer in whose stage each layer of `evaluation` runs, usually the same layer."""
        return {} if self.evaluation is None else find_homes(self, self.evaluation)

    def evaluated_with(self, ids: Iterable[str]) -> tuple[Layer, ...]:
        """The layers of `evaluation` in the stage of the layers `ids`, in the order of execution."""
        chosen = set(ids)
        layers = () if self.evaluation is None else self.evaluation.layers
        return tuple(layer for layer in layers if self.homes[layer.id] in chosen)

    @cached_property
    def layer_by_id(self) -> dict[str, Layer]:
        return {layer.id: layer for layer in self.layers}

    def inside(self, paths: Collection[str]) -> tuple[Layer, ...]:
        """The layers inside of the modules at `paths`; the path of the model itself selects all."""
        if "" in paths:
            return self.layers
        return tuple(layer for layer in self.layers if any(p in paths for p, _ in layer.location.within))

    @cached_property
    def node_by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """The index of each node in the order of execution."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @cached_property
    def layer_of(self) -> dict[str, str]:
        """The layer that computes each value; the model's inputs have none."""
        return {node.name: layer.id for layer in self.layers for node in layer.nodes}

    def value(self, name: str) -> Value:
        meta = self.node_by_name[name].meta
        return Value(name, meta["shape"], meta["dtype"], meta["requires_grad"])

    def order_inputs(self, arguments: Sequence[Any] | Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a model's arguments in the order of `inputs`, whatever the order of dicts.

        Numbers and text among them are packed into tensors.
        """
        values = inputs_by_path(arguments)
        tensors = {path for path, leaf in values.items() if isinstance(leaf, torch.Tensor)}
        if tensors != {path for path in self.input_paths if path not in self.value_paths}:
            raise InputError(
                f"found tensors at {', '.join(sorted(tensors)) or 'no path'} of a batch's inputs, where the "
                f"trace had {', '.join(self.input_paths)}; give every batch the same ones"
            )
        self._check_values(values)
        return [
            packed_value(values[path]) if path in self.value_paths else values[path]
            for path in self.input_paths
        ]

    @cached_property
    def value_paths(self) -> frozenset[str]:
        """The `input_paths` of numbers and text."""
        pairs = zip(self.inputs, self.input_paths)
        return frozenset(path for name, path in pairs if not is_tensor(self.node_by_name[name]))

    def _check_values(self, values: Mapping[str, Any]) -> None:
        for path in self.value_paths:
            if not isinstance(values.get(path), (int, float, str)):
                raise InputError(
                    f"found {values.get(path)!r} at {path} of a batch's inputs, where the trace had a "
                    f"number or text; give every batch one"
                )
        for path, fixed in self.fixed_values.items():
            if not same_value(values.get(path), fixed.value):
                raise InputError(fixed.describe(path, values.get(path)))

    def check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise InputError for inputs whose sizes the trace does not support."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        if shapes in self._good_shapes:
            return
        why = self.guards.broken_by(shapes)
        if why is not None:
            raise InputError(
                f"{why}; give every batch such sizes (pad inputs to one length, drop the last batch), or do "
                f"not cut through the module with this code"
            )
        self._good_shapes.add(shapes)

    @cached_property
    def _good_shapes(self) -> set[tuple[tuple[int, ...], ...]]:
        return set()

    def select(self, ids: Iterable[str]) -> tuple[Layer, ...]:
        """The layers `ids`, in the order of execution."""
        chosen = set(ids)
        unknown = chosen - self.layer_by_id.keys()
        if unknown:
            name = min(unknown)
            raise InputError(f"there is no layer {name!r}{did_you_mean(name, self.layer_by_id)}")
        return tuple(layer for layer in self.layers if layer.id in chosen)

    def boundary(self, layers: Sequence[Layer]) -> Boundary:
        """The values that `layers` need from other layers, and those that other layers need from them."""
        inside = {node: None for layer in layers for node in layer.nodes}
        needed = {arg: None for node in inside for arg in node.all_input_nodes if arg not in inside}
        for extra in self._size_givers(inside, needed):
            needed[extra] = None
        final = set(self.outputs)
        given = [n for n in inside if n.name in final or any(user not in inside for user in n.users)]
        return Boundary(
            tuple(node.name for node in sorted(needed, key=self.position.__getitem__)),
            tuple(node.name for node in given),
        )

    def _size_givers(self, inside: dict[fx.Node, None], needed: dict[fx.Node, None]) -> list[fx.Node]:
        """Inputs of the model that are needed only to read a size or the device from them."""
        extra: list[fx.Node] = []
        known = list(needed)
        for node in inside:
            missing = [s for s in node.meta.get("symbols", ()) if size_source(s, known) is None]
            for symbol in missing:
                extra.append(self._input_with(symbol, node))
                known.append(extra[-1])
            if node.meta.get("device") and not any(is_tensor(value) for value in known):
                extra.append(self.node_by_name[self.inputs[0]])
                known.append(extra[-1])
            known.append(node)
        return extra

    def _input_with(self, symbol: Symbol, node: fx.Node) -> fx.Node:
        source = size_source(symbol, (self.node_by_name[name] for name in self.inputs))
        if source is None:
            raise TraceError(
                f"layer {self.layer_of[node.name]!r} needs a size that depends on the values of a tensor in "
                f"another layer; {FIXED_SHAPES}"
            )
        return source[0]

    def rebuild_output(self, values: Mapping[str, Any]) -> Any:
        """The model's output, from values by name, of which it needs `outputs`."""
        leaves = [values[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_spec)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node is a tensor, and not a number or text among the inputs."""
    return "shape" in node.meta and not node.meta.get("python")


def same_value(one: Any, other: Any) -> bool:
    """Whether two values other than tensors are equal; by identity if they cannot be compared."""
    try:
        return one is other or (type(one) is type(other) and bool(np.all(one == other)))
    except (TypeError, ValueError):
        return False


def inputs_by_path(arguments: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The tensors and other values in the arguments of a model, by path (keys and indices)."""
    given = dict(arguments) if isinstance(arguments, Mapping) else tuple(arguments)
    try:
        return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(given)[0]}
    except ValueError:  # user containers that were registered without keys
        return {f"[{number}]": leaf for number, leaf in enumerate(pytree.tree_leaves(given))}


def tensors_by_path(arguments: Sequence[Any] | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a model, by path."""
    values = inputs_by_path(arguments).items()
    return {path: leaf for path, leaf in values if isinstance(leaf, torch.Tensor)}


def find_homes(traced: TracedModel, other: TracedModel) -> dict[str, str]:
    """For each layer of `other`, another trace of the same model, the layer of `traced` that it belongs to.

    That is the one at the same location in the code. Code that `traced` has not run belongs to the layer
    whose parameters it uses; code without parameters, to a layer not before those that compute its inputs.
    """
    calls: dict[tuple[str, int], list[Layer]] = {}
    users: dict[str, Layer] = {}
    for layer in traced.layers:
        calls.setdefault((layer.location.path, layer.location.call), []).append(layer)
        for name in (*layer.parameters, *layer.buffers):
            users.setdefault(name, layer)
    order = {layer.id: i for i, layer in enumerate(traced.layers)}
    homes: dict[str, str] = {}
    for layer in other.layers:
        same = [
            candidate
            for candidate in calls.get((layer.location.path, layer.location.call), ())
            if candidate.location.index <= layer.location.index
        ]
        users_of = [users[name] for name in (*layer.parameters, *layer.buffers) if name in users]
        made = [other.layer_of.get(name) for name in other.boundary([layer]).inputs]
        before = [traced.layer_by_id[homes[name]] for name in made if name is not None]
        if not users_of:
            # If other modules were called before, the same location may be an earlier layer.
            same = sorted([*same[-1:], *before], key=lambda each: order[each.id])
        matching = same[-1:] or users_of[:1]
        homes[layer.id] = matching[0].id if matching else traced.layers[0].id
    return homes


def size_source(symbol: Symbol, nodes: Iterable[fx.Node]) -> tuple[fx.Node, int, int] | None:
    """The first node with `symbol`, or an integer multiple of it, among its sizes: node, dim, multiple."""
    for node in nodes:
        for dim, size in enumerate(node.meta.get("shape", ())):
            if isinstance(size, Expr) and symbol in size.free_symbols:
                multiple = size / symbol
                if multiple.is_Integer:
                    return node, dim, int(multiple)
    return None
