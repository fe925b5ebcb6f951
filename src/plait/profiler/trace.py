"""Traces an unmodified model on example inputs into layers."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from plait.data.generators import kept_generators, looks
from plait.profiler.arguments import PLAIN, SizeArgument
from plait.profiler.kept_state import (
    SecondForward,
    changed_state,
    mode_concerns,
    note_numbers,
    python_draws,
)
from plait.profiler.recorded_calls import operation_name
from plait.profiler.recorder import CallRecorder, MustOpen
from plait.profiler.symbols import Sizes, fake_inputs
from plait.profiler.trace_errors import TraceError, explain, refusal
from plait.profiler.traced_model import (
    Concern,
    FixedValue,
    Guards,
    KeptState,
    Layer,
    TracedModel,
    inputs_by_path,
    same_value,
    tensors_by_path,
)
from plait.profiler.watched_values import can_watch, is_watched, plain
from plait.verification.python_state import PythonState, state_of

Inputs = Sequence[Any] | Mapping[str, Any]

# Functions that only rearrange; a layer is named after another function if it has one.
_MINOR = frozenset(
    (
        *("getitem", "pick", "after", "get_attr", "to", "type_as", "contiguous", "expand"),
        *("view", "reshape", "flatten", "transpose", "t", "T", "permute", "unsqueeze", "squeeze"),
    )
)


def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    others: Sequence[Inputs] = (),
    whole: Collection[str] = (),
    evaluation: bool = True,
) -> TracedModel:
    """The layers of `model` on `inputs`, in its current mode (train or eval).

    `inputs` are the arguments of its forward: a sequence, or a mapping for keywords. The first size of each
    tensor (and the second of integer and boolean tensors) is free, so the trace is valid for any batch; so
    are sizes in which `others`, additional inputs, differ. The modules in `whole` become one layer each,
    which calls the module itself, if its arguments and results allow it. A model in training mode is also
    traced in evaluation mode, unless `evaluation` is False. The model is run on fake tensors and not changed.
    Trace under the same autocast as in training. Raises TraceError with the line of the model's source that
    cannot be traced.
    """
    examples = _Examples(inputs, others)
    traced = _trace_once(model, examples, frozenset(whole), {})
    if not model.training or not evaluation:
        return traced
    try:
        # The same modules stay whole, and constants keep their names.
        evaluated = replace(examples, evaluating=True)
        other = _trace_once(model, evaluated, traced.whole, traced.constants)
        traced = replace(traced, evaluation=other)
    except TraceError as failure:
        traced = replace(traced, no_evaluation=str(failure))
    return traced


@dataclass(frozen=True)
class _Examples:
    """The inputs to trace with, others that show which sizes change, and whether to trace evaluation mode."""

    inputs: Inputs
    others: Sequence[Inputs]
    evaluating: bool = False


# Of the models that were traced last, for inputs of the same sizes: a fake tensor mode caches most calls.
_MODES: dict[Any, FakeTensorMode] = {}
_MOST_MODES = 16


def _mode_for(model: nn.Module, examples: _Examples) -> FakeTensorMode:
    """The mode of an earlier trace of such a model, unless it has replaced sizes; else a new one."""
    named = [(name, tensor) for name, tensor in _named_tensors(model) if not is_lazy(tensor)]
    tensors = [*named, *(("", each) for one in (examples.inputs, *examples.others) for each in _tensors(one))]
    key = type(model), *((name, each.shape, each.dtype, each.device) for name, each in tensors)
    mode = _MODES.pop(key, None)
    if mode is None or mode.shape_env is None or mode.shape_env.replacements:
        mode = FakeTensorMode(shape_env=Sizes(), allow_non_fake_inputs=True)
    _MODES[key] = mode
    if len(_MODES) > _MOST_MODES:
        del _MODES[next(iter(_MODES))]
    return mode


def _trace_once(
    model: nn.Module,
    examples: _Examples,
    whole: frozenset[str],
    constants: Mapping[str, Tensor],
) -> TracedModel:
    """The model as layers, in its current mode; modules of `whole` that cannot be one layer are traced."""
    while True:
        try:
            return _trace_whole(model, examples, whole, constants)
        except MustOpen as refused:
            whole -= refused.paths


def _trace_whole(
    model: nn.Module,
    examples: _Examples,
    whole: frozenset[str],
    constants: Mapping[str, Tensor],
) -> TracedModel:
    inputs, others = examples.inputs, examples.others
    args, kwargs = _arguments(inputs)
    _, spec = pytree.tree_flatten((args, kwargs))
    tensors = _tensors(inputs)
    if not tensors:
        raise TraceError(f"found no tensor among the inputs of {type(model).__name__}; expected at least one")
    mode = _mode_for(model, examples)
    sizes = mode.shape_env
    assert isinstance(sizes, Sizes)
    sizes.silent = 1
    sizes.branches.clear()
    recorder = CallRecorder(model, sizes, whole, constants)
    fakes = fake_inputs(mode, tensors, [_tensors_like(inputs, other) for other in others])
    nodes = [recorder.add_input(n, f) for n, f in zip(_input_names(model, args, kwargs), fakes)]
    shapes = tuple(node.meta["shape"] for node in nodes)
    remaining = iter(fakes)
    # Numbers and text may differ between batches, unless the model's code depends on them, which is recorded.
    stand_ins = [
        next(remaining)
        if isinstance(leaf, Tensor)
        else recorder.add_value(_as_name(path), leaf)
        if can_watch(leaf)
        else leaf
        for path, leaf in inputs_by_path(inputs).items()
    ]
    args, kwargs = pytree.tree_unflatten(stand_ins, spec)
    run = _run(model, args, kwargs, mode, recorder, sizes, examples.evaluating)
    output_leaves, output_spec = run.leaves, run.spec
    _check_batch_is_free(fakes[0], sizes)
    outputs = tuple(dict.fromkeys(leaf.name for leaf in output_leaves if isinstance(leaf, fx.Node)))
    fixed_values, variable_values = _values(recorder, inputs, stand_ins)
    _prune(recorder.graph, set(outputs))
    _resolve_sizes(recorder.graph, sizes)
    fixed = tuple((symbol, number, line) for symbol, (number, line) in sizes.fixed.items())
    return TracedModel(
        model,
        recorder.graph,
        _layers(model, recorder),
        (*(node.name for node in nodes), *variable_values),
        outputs,
        tuple(output_leaves),
        output_spec,
        recorder.constants,
        (*tensors_by_path(inputs), *variable_values.values()),
        fixed_values,
        whole,
        Guards(shapes, recorder.size_read, fixed, tuple(sizes.branches)),
        run.concerns or tuple(_value_concerns(fixed_values, others)),
        run.written,
        run.kept,
    )


def _as_name(path: str) -> str:
    """A name for the input value at `path`."""
    name = "_".join(re.findall(r"\w+", path))
    return name if name.isidentifier() else f"value_{name}"


def _values(
    recorder: CallRecorder, inputs: Inputs, stand_ins: Sequence[Any]
) -> tuple[dict[str, FixedValue], dict[str, str]]:
    """The values that must not change, by path; and the paths of those that calls take, by name."""
    fixed, variable_values = {}, {}
    known = recorder.opened
    for (input_path, leaf), stand_in in zip(inputs_by_path(inputs).items(), stand_ins):
        if isinstance(leaf, Tensor):
            continue
        if not is_watched(stand_in):
            fixed[input_path] = FixedValue(leaf, "", type(known[""]).__name__)
        elif (path := recorder.looked_at.get(stand_in.node.name)) is not None:
            fixed[input_path] = FixedValue(leaf, path, type(known[path]).__name__)
        if is_watched(stand_in) and stand_in.node.users:
            variable_values[stand_in.node.name] = input_path
        elif is_watched(stand_in):
            recorder.graph.erase_node(stand_in.node)
    return fixed, variable_values


def _value_concerns(fixed: Mapping[str, FixedValue], others: Sequence[Inputs]) -> Iterator[Concern]:
    """Concerns if other inputs differ in a value that traced modules depend on."""
    for other in others:
        values = inputs_by_path(other)
        for path, value in fixed.items():
            if not same_value(values.get(path), value.value):
                yield Concern(value.path, value.describe(path, values.get(path)))


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(_arguments(inputs)) if isinstance(leaf, Tensor)]


def _tensors_like(inputs: Inputs, others: Inputs) -> list[Tensor]:
    """The tensors of `others` in the order of `inputs`, if they have the same paths."""
    tensors, paths = tensors_by_path(others), list(tensors_by_path(inputs))
    return [tensors[path] for path in paths] if tensors.keys() == set(paths) else _tensors(others)


@dataclass(frozen=True)
class _Forward:
    """The output of a recorded forward, with nodes for tensors, and its concerns.

    `written` are the tensors of the model that it wrote; `kept` is the kept state of whole modules.
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    concerns: tuple[Concern, ...]
    written: frozenset[str]
    kept: tuple[KeptState, ...]


def _run(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    mode: FakeTensorMode,
    recorder: CallRecorder,
    sizes: Sizes,
    evaluating: bool = False,
) -> _Forward:
    """Record one forward pass, in the model's current mode or, with `evaluating`, in evaluation mode."""
    try:
        with _unchanged(model) as state, _quiet():
            recorder.replace_tensors(model, mode)
            if evaluating:
                # What models do in eval(), such as merging weights, is done to fake tensors.
                with mode, enable_python_dispatcher():
                    model.eval()
            before = state.tokens(same_tensors=True)
            tensors = [(name, tensor, tensor._version) for name, tensor in _named_tensors(model)]
            random_before = looks()
            # The Python dispatcher supports symbolic sizes, which C++ would fix.
            with torch.enable_grad(), mode, enable_python_dispatcher(), recorder.watching():
                sizes.silent = 0
                result = model(*args, **kwargs)
                sizes.silent = 1
                leaves, spec = pytree.tree_flatten(result)
                outputs = [_output_leaf(recorder, leaf) for leaf in leaves]
                _require_tensors(result, outputs)
            written = _written_tensors(model, recorder, tensors)
            concerns, kept = python_draws(random_before), list[KeptState]()
            if not concerns and (moved := changed_state(before, state)):
                again = SecondForward(model, args, kwargs, mode, recorder, state)
                concerns, kept = again.find_kept(moved)
            if not concerns:
                note_numbers(SecondForward(model, args, kwargs, mode, recorder, state))
            if evaluating and not concerns:
                concerns = mode_concerns(recorder.opened, state, mode)
            return _Forward(outputs, spec, tuple(concerns), written, tuple(kept))
    except MustOpen:
        raise
    except Exception as failure:  # a user's forward can raise anything
        raise explain(failure) from failure


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _written_tensors(
    model: nn.Module, recorder: CallRecorder, before: list[tuple[str, Tensor, int]]
) -> frozenset[str]:
    """The tensors that forward wrote or replaced, including buffers of norms (no version counter)."""
    now = dict(_named_tensors(model))
    written = {
        name
        for name, old, version in before
        if now.get(name) is not old or old._version != version or recorder.is_written(old)
    }
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            written |= {f"{path}.{name}" if path else name for name, _ in module.named_buffers()}
    written |= {name for name, constant in recorder.constants.items() if recorder.is_written(constant)}
    return frozenset(written)


def _output_leaf(recorder: CallRecorder, leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return recorder.node_of(leaf)
    if is_watched(leaf):
        leaf.on_use()
        return plain(leaf)
    return leaf if isinstance(leaf, PLAIN) else None


def _require_tensors(result: Any, leaves: Sequence[Any]) -> None:
    if not any(isinstance(leaf, fx.Node) for leaf in leaves):
        raise refusal(
            f"forward returns a {type(result).__name__}, in which torch sees no tensors",
            "return a tensor, a tuple, a dict or a named tuple of tensors, or register the class with "
            "torch.utils._pytree",
            None,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's logs of failures, which TraceError describes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[PythonState]:
    """Context after which the state of the modules, Python state, and the random state are restored."""
    state = state_of(model)
    holders = [
        holder
        for module in model.modules()
        for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
    ]
    before = [dict(holder) for holder in holders]
    try:
        # Fake tensors draw nothing on other devices.
        with kept_generators():
            yield state
    finally:
        state.restore()
        for holder, kept in zip(holders, before):
            holder.clear()
            holder.update(kept)


def _input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each input tensor: that of its parameter of forward."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional += [f"input_{i}" for i in range(len(positional), len(args))]
    names: list[str] = []
    for name, item in [*zip(positional, args), *kwargs.items()]:
        count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(item))
        names += [name] if count == 1 else [f"{name}_{i}" for i in range(count)]
    return names


def _check_batch_is_free(first: Tensor, sizes: Sizes) -> None:
    symbol: Any = first.shape[0] if first.dim() else 0
    if not isinstance(symbol, torch.SymInt):
        return
    number, line = sizes.fixed.get(symbol.node._expr, (None, None))
    if number is not None:
        raise refusal(
            "this fixes the batch size (a loop over the batch, len() or int() of a size)",
            "compute on the whole batch at once, and read its size as x.shape[0]",
            line,
        )


def _prune(graph: fx.Graph, outputs: set[str]) -> None:
    """Remove unused nodes, except module calls and in-place writes, which have side effects."""
    for node in reversed(list(graph.nodes)):
        has_effect = node.op in ("placeholder", "call_module") or "writes" in node.meta
        if not node.users and not has_effect and node.name not in outputs:
            graph.erase_node(node)


def _resolve_sizes(graph: fx.Graph, sizes: Sizes) -> None:
    """Replace all sizes by expressions of the symbols that remain after the trace."""

    def resolved(size: Any) -> Any:
        if isinstance(size, int):
            return size
        expression = sizes.replace(size)
        return int(expression) if expression.is_Integer else expression

    def resolved_argument(item: Any) -> Any:
        if not isinstance(item, SizeArgument):
            return item
        size = resolved(item.expression)
        return size if isinstance(size, int) else SizeArgument(size)

    for node in graph.nodes:
        if "shape" in node.meta:
            node.meta["shape"] = tuple(resolved(size) for size in node.meta["shape"])
        if "symbols" in node.meta:
            node.args = fx.node.map_aggregate(node.args, resolved_argument)
            node.kwargs = fx.node.map_aggregate(node.kwargs, resolved_argument)
            free = {s for old in node.meta["symbols"] for s in getattr(resolved(old), "free_symbols", ())}
            node.meta["symbols"] = tuple(sorted(free, key=str))


def _layers(model: nn.Module, recorder: CallRecorder) -> tuple[Layer, ...]:
    groups: dict[int, list[fx.Node]] = {}
    for node in recorder.graph.nodes:
        if node.op != "placeholder":
            groups.setdefault(node.meta["group"], []).append(node)
    parameters = {id(tensor): name for name, tensor in model.named_parameters()}
    buffers = {id(tensor): name for name, tensor in model.named_buffers()}
    seen: Counter[str] = Counter()
    layers = []
    for nodes in groups.values():
        name = _layer_name(nodes)
        seen[name] += 1
        uses = [node for node in nodes if node.target not in recorder.constants]
        used = {id(tensor) for node in uses for tensor in _tensors_of(model, node)}
        layers.append(
            Layer(
                name if seen[name] == 1 else f"{name}@{seen[name]}",
                _description(model, nodes),
                tuple(nodes),
                tuple(name for key, name in parameters.items() if key in used),
                tuple(name for key, name in buffers.items() if key in used),
                recorder.locations[nodes[0].meta["group"]],
            )
        )
    return tuple(layers)


def _tensors_of(model: nn.Module, node: fx.Node) -> Iterator[Tensor]:
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        yield from module.parameters()
        yield from module.buffers()
    elif node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        yield getattr(model.get_submodule(owner), name)


def _operation(node: fx.Node) -> str:
    if node.op == "get_attr":
        return "get_attr"
    return str(node.args[1]) if node.target is getattr else operation_name(node.target)


def _layer_name(nodes: list[fx.Node]) -> str:
    for node in nodes:
        if node.op == "call_module":
            return str(node.target)
    names = [_operation(node) for node in nodes]
    chosen = next((name for name in names if name not in _MINOR), names[0])
    path = nodes[-1].meta["path"]
    return f"{path}.{chosen}" if path else chosen


def _description(model: nn.Module, nodes: list[fx.Node]) -> str:
    for node in nodes:
        if node.op == "call_module":
            return " ".join(repr(model.get_submodule(str(node.target))).split())
    return ", ".join(_operation(node) for node in nodes if node.op != "get_attr")
