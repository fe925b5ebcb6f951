"""A traced model: its operations in order, grouped into layers, and the values that pass between them."""

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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.profiler.arguments import packed_value
from plait.profiler.failures import FIXED_SHAPES, SourceLine, TraceError
from plait.profiler.record import Place
from plait.profiler.symbols import Branch, Shape


@dataclass(frozen=True)
class Value:
    """A tensor that passes between layers. A size that follows the batch is an expression of symbols."""

    name: str
    shape: Shape
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Layer:
    """Operations that stay together: one call of a torch.nn module, or the run of functions between two.

    `id` is the module's path; a second call of the same module is `path@2`. `parameters` and `buffers`
    are the names of the original model; of a tied parameter, the name that comes first there. `place` is the
    same in every trace of the model.
    """

    id: str
    description: str
    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    place: Place = field(default_factory=lambda: Place("", 1, 0, ()))


@dataclass(frozen=True)
class Concern:
    """Something that a module's own code does and a trace cannot repeat."""

    path: str
    words: str


@dataclass(frozen=True)
class KeptState:
    """Something in Python that forwards of whole modules change, of the modules at `paths` together.

    It is right as long as one worker runs all of them, and all microbatches.
    """

    paths: tuple[str, ...]
    words: str


@dataclass(frozen=True)
class FixedValue:
    """A value among the inputs that the code of the opened module at `path`, of that kind, goes by."""

    value: Any
    path: str
    kind: str

    def describe(self, place: str, found: Any) -> str:
        """Why the value at `place` must not be another one."""
        owner = f"{self.path} ({self.kind})" if self.path else self.kind
        return (
            f"found {found!r} at {place} of a batch's inputs, where the trace had {self.value!r}, and the "
            f"code of {owner} goes by it; give it as a tensor, or let a module that no cut divides go by it"
        )


@dataclass(frozen=True)
class Guards:
    """What of the sizes of the inputs the trace has fixed.

    `shapes` are those of the inputs, symbols in the free dimensions. `size_read` is a line of the model that
    read a size which is a number in them; where there is none, such sizes may change. `fixed` are sizes that
    the model's operations made numbers, and `branches` the ways that its code took.
    """

    shapes: tuple[Shape, ...] = ()
    size_read: SourceLine | None = None
    fixed: tuple[tuple[Symbol, int, SourceLine | None], ...] = ()
    branches: tuple[Branch, ...] = ()

    def broken_by(self, shapes: Sequence[Sequence[int]]) -> str | None:
        """Why the trace does not hold for inputs of these shapes; None where it does."""
        sizes: dict[Symbol, int] = {}
        for traced, found in zip(self.shapes, shapes):
            if len(traced) != len(found):
                return f"found an input of {len(found)} dimensions, where the trace had {len(traced)}"
            for dim, (known, size) in enumerate(zip(traced, found)):
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
    """What enters and what leaves a set of layers, by the names of values, in the order they are made."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class TracedModel:
    """Layers in the order of execution, over the parameters of `model`.

    The nodes name modules, parameters and buffers of `model` by their path; `constants` holds the
    tensors that are neither. `inputs` and `outputs` are names of values; `output_spec` rebuilds what the
    model returns from its outputs (what is neither a tensor nor a plain value comes back as None).
    """

    model: nn.Module
    graph: fx.Graph
    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_leaves: tuple[Any, ...]
    output_spec: pytree.TreeSpec
    constants: dict[str, torch.Tensor]
    # Where each of `inputs` was among the arguments of the model, as `place_inputs` names it: the tensors
    # first, then numbers and text that calls take as they are. By place also the values that must not change.
    input_places: tuple[str, ...] = ()
    fixed_values: Mapping[str, FixedValue] = field(default_factory=dict)
    # Which modules are one layer each, besides torch's own.
    whole: frozenset[str] = frozenset()
    guards: Guards = field(default_factory=Guards)
    # What the code of opened modules does that a trace cannot repeat.
    concerns: tuple[Concern, ...] = ()
    # Buffers, parameters and constants that forward writes, by their first names.
    written: frozenset[str] = frozenset()
    # What modules that were not opened keep from one forward to the next.
    kept: tuple[KeptState, ...] = ()
    # The same model in evaluation mode; where that cannot be traced, why. Neither where it was traced so.
    evaluation: TracedModel | None = None
    no_evaluation: str | None = None
    # The tensors without values that it was traced with, which make a further trace faster.
    mode: FakeTensorMode | None = None

    @cached_property
    def homes(self) -> dict[str, str]:
        """The layer in whose stage each layer of `evaluation` runs, which is mostly the same one."""
        return {} if self.evaluation is None else find_homes(self, self.evaluation)

    def evaluated_with(self, ids: Iterable[str]) -> tuple[Layer, ...]:
        """The layers of `evaluation` that run where the layers `ids` do, in the order of execution."""
        chosen = set(ids)
        layers = () if self.evaluation is None else self.evaluation.layers
        return tuple(layer for layer in layers if self.homes[layer.id] in chosen)

    @cached_property
    def layer_by_id(self) -> dict[str, Layer]:
        return {layer.id: layer for layer in self.layers}

    def inside(self, paths: Collection[str]) -> tuple[Layer, ...]:
        """The layers whose code the modules at `paths`, or their parts, run; the model itself runs all."""
        if "" in paths:
            return self.layers
        return tuple(layer for layer in self.layers if any(p in paths for p, _ in layer.place.within))

    @cached_property
    def node_by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """The place of each node in the order of execution."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @cached_property
    def layer_of(self) -> dict[str, str]:
        """The layer that makes each value; the model's inputs have none."""
        return {node.name: layer.id for layer in self.layers for node in layer.nodes}

    def value(self, name: str) -> Value:
        meta = self.node_by_name[name].meta
        return Value(name, meta["shape"], meta["dtype"], meta["requires_grad"])

    def order_inputs(self, arguments: Sequence[Any] | Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a model's arguments in the order of `inputs`, also where a dict has another one.

        Numbers and text among them are packed into tensors.
        """
        found = place_inputs(arguments)
        tensors = {place for place, leaf in found.items() if isinstance(leaf, torch.Tensor)}
        if tensors != {place for place in self.input_places if place not in self.value_places}:
            raise InputError(
                f"found tensors at {', '.join(sorted(tensors)) or 'no place'} of a batch's inputs, where the "
                f"trace had {', '.join(self.input_places)}; give every batch the same ones"
            )
        self._check_values(found)
        return [
            packed_value(found[place]) if place in self.value_places else found[place]
            for place in self.input_places
        ]

    @cached_property
    def value_places(self) -> frozenset[str]:
        """Those of `input_places` at which there are numbers or text."""
        pairs = zip(self.inputs, self.input_places)
        return frozenset(place for name, place in pairs if not is_tensor(self.node_by_name[name]))

    def _check_values(self, found: Mapping[str, Any]) -> None:
        for place in self.value_places:
            if not isinstance(found.get(place), (int, float, str)):
                raise InputError(
                    f"found {found.get(place)!r} at {place} of a batch's inputs, where the trace had a "
                    f"number or text; give every batch one"
                )
        for place, fixed in self.fixed_values.items():
            if not same_value(found.get(place), fixed.value):
                raise InputError(fixed.describe(place, found.get(place)))

    def check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse inputs for whose sizes the model would do something else than it did in the trace."""
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        if shapes in self._good_shapes:
            return
        why = self.guards.broken_by(shapes)
        if why is not None:
            raise InputError(
                f"{why}; give every batch such sizes (pad inputs to one length, drop the last batch), or let "
                f"no cut pass through the module whose code this is"
            )
        self._good_shapes.add(shapes)

    @cached_property
    def _good_shapes(self) -> set[tuple[tuple[int, ...], ...]]:
        return set()

    def select(self, ids: Iterable[str]) -> tuple[Layer, ...]:
        """The layers named, in the order of execution."""
        chosen = set(ids)
        unknown = chosen - self.layer_by_id.keys()
        if unknown:
            name = min(unknown)
            raise InputError(f"there is no layer {name!r}{did_you_mean(name, self.layer_by_id)}")
        return tuple(layer for layer in self.layers if layer.id in chosen)

    def boundary(self, layers: Sequence[Layer]) -> Boundary:
        """The values that `layers`, run together, need from outside and give to the outside."""
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
        """Inputs of the model that are needed only because a size, or the device, is read from them."""
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

    def rebuild_output(self, values: Sequence[Any]) -> Any:
        """What the model would return, from the values named by `outputs`."""
        given = dict(zip(self.outputs, values, strict=True))
        leaves = [given[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_spec)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node stands for a tensor, and not for a number or text among the inputs."""
    return "shape" in node.meta and not node.meta.get("python")


def same_value(one: Any, other: Any) -> bool:
    """Whether two values that are no tensors are the same; of what cannot be compared, the same object."""
    try:
        return one is other or (type(one) is type(other) and bool(np.all(one == other)))
    except (TypeError, ValueError):
        return False


def place_inputs(arguments: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments of a model hold, tensors and other values, by their keys and numbers there."""
    given = dict(arguments) if isinstance(arguments, Mapping) else tuple(arguments)
    try:
        return {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(given)[0]}
    except ValueError:  # containers of a user that were registered without names for what they hold
        return {f"[{number}]": leaf for number, leaf in enumerate(pytree.tree_leaves(given))}


def place_tensors(arguments: Sequence[Any] | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a model, as `place_inputs` has them."""
    found = place_inputs(arguments).items()
    return {place: leaf for place, leaf in found if isinstance(leaf, torch.Tensor)}


def find_homes(traced: TracedModel, other: TracedModel) -> dict[str, str]:
    """For each layer of `other`, a further trace of the same model, the layer of `traced` it belongs to.

    That is the one at the same place in the code. Code that `traced` has not run goes with the layer whose
    parameters it uses; code without parameters not before the layers that make the values it takes.
    """
    calls: dict[tuple[str, int], list[Layer]] = {}
    users: dict[str, Layer] = {}
    for layer in traced.layers:
        calls.setdefault((layer.place.path, layer.place.call), []).append(layer)
        for name in (*layer.parameters, *layer.buffers):
            users.setdefault(name, layer)
    order = {layer.id: i for i, layer in enumerate(traced.layers)}
    homes: dict[str, str] = {}
    for layer in other.layers:
        same = [
            candidate
            for candidate in calls.get((layer.place.path, layer.place.call), ())
            if candidate.place.index <= layer.place.index
        ]
        own = [users[name] for name in (*layer.parameters, *layer.buffers) if name in users]
        made = [other.layer_of.get(name) for name in other.boundary([layer]).inputs]
        before = [traced.layer_by_id[homes[name]] for name in made if name is not None]
        if not own:
            # Where other modules were called before, the same place may be an earlier one.
            same = sorted([*same[-1:], *before], key=lambda each: order[each.id])
        found = same[-1:] or own[:1]
        homes[layer.id] = found[0].id if found else traced.layers[0].id
    return homes


def size_source(symbol: Symbol, nodes: Iterable[fx.Node]) -> tuple[fx.Node, int, int] | None:
    """The first node that has `symbol`, or a whole multiple of it, among its sizes: node, dim, multiple."""
    for node in nodes:
        for dim, size in enumerate(node.meta.get("shape", ())):
            if isinstance(size, Expr) and symbol in size.free_symbols:
                multiple = size / symbol
                if multiple.is_Integer:
                    return node, dim, int(multiple)
    return None
