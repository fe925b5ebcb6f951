"""Builds a runnable module from layers of a traced model."""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.profiler.arguments import read_value
from plait.profiler.failures import TraceError
from plait.profiler.source import Source, indent, write_source
from plait.profiler.traced import Boundary, Layer, TracedModel


class LayersModule(nn.Module):
    """Some layers of a model: takes their input values, returns a tuple of their output values.

    Its parameters, buffers and modules are the original objects, under their original names. In evaluation
    mode it computes `evaluation`, if given; a text instead is the reason why it cannot.
    """

    def __init__(
        self,
        source: Source,
        attributes: Iterable[tuple[str, Any, bool]],
        name: str,
        evaluation: Source | str | None = None,
    ) -> None:
        super().__init__()
        attributes = list(attributes)
        numbered = {path.rpartition(".")[0] for path in _paths(attributes) if _is_number(path)}
        for path, item, persistent in attributes:
            _attach(self, path, item, persistent, numbered)
        self._compute = self._evaluate = _compile(source, name)
        self._values = self._evaluated_values = source.values
        self._no_evaluation = evaluation if isinstance(evaluation, str) else None
        if isinstance(evaluation, Source):
            self._evaluate = _compile(evaluation, f"{name}, evaluation")
            self._evaluated_values = evaluation.values

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not self.training and self._no_evaluation is not None:
            raise TraceError(f"the model cannot be evaluated in stages: {self._no_evaluation}")
        compute = self._compute if self.training else self._evaluate
        values = self._values if self.training else self._evaluated_values
        given: Iterable[Any] = inputs
        if values:
            given = (read_value(each) if i in values else each for i, each in enumerate(inputs))
        result: tuple[Tensor, ...] = compute(self, *given)
        return result


def build(
    traced: TracedModel, layers: tuple[Layer, ...], boundary: Boundary, own_inputs: bool
) -> LayersModule:
    """`layers` as one module over the model's parameters; see `write_source` for `own_inputs`."""
    attributes = all_attributes(traced, layers)
    modules = [path for path, item, _ in attributes if isinstance(item, nn.Module)]
    source = write_source(traced, layers, boundary, own_inputs, modules=modules)
    name = layers[0].id if len(layers) == 1 else f"{layers[0].id} to {layers[-1].id}"
    evaluation: Source | str | None = traced.no_evaluation
    if traced.evaluation is not None:
        evaluation, _ = write_evaluation(traced, layers, source, own_inputs, modules)
    module = LayersModule(source, attributes, name, evaluation)
    module.training = traced.model.training  # submodules keep their modes
    return module


def write_evaluation(
    traced: TracedModel,
    layers: Sequence[Layer],
    source: Source,
    own_inputs: bool,
    modules: Collection[str] = (),
) -> tuple[Source, Boundary]:
    """The source for evaluation mode that corresponds to `layers`, whose training mode is `source`."""
    assert traced.evaluation is not None
    other, evaluated = replace(traced.evaluation, model=traced.model), traced.evaluated_with(_ids(layers))
    boundary = other.boundary(evaluated)
    return write_source(other, evaluated, boundary, own_inputs, source.objects, modules), boundary


def all_attributes(traced: TracedModel, layers: Sequence[Layer]) -> list[tuple[str, Any, bool]]:
    """Same as `attributes_of`, for training and evaluation mode together."""
    attributes = {path: (item, persistent) for path, item, persistent in attributes_of(traced, layers)}
    if traced.evaluation is not None:
        other = replace(traced.evaluation, model=traced.model)
        for path, item, persistent in attributes_of(other, traced.evaluated_with(_ids(layers))):
            attributes.setdefault(path, (item, persistent))
    # Attributes of a listed module are included with it.
    inside = tuple(f"{path}." for path, (item, _) in attributes.items() if isinstance(item, nn.Module))
    return [(path, *item) for path, item in attributes.items() if not path.startswith(inside)]


def _ids(layers: Iterable[Layer]) -> list[str]:
    return [layer.id for layer in layers]


def attributes_of(traced: TracedModel, layers: Iterable[Layer]) -> Iterator[tuple[str, Any, bool]]:
    """The modules, then the parameters, buffers and constants, that `layers` use directly.

    Each with its path, and whether it belongs to the model's state_dict.
    """
    nodes = [node for layer in layers for node in layer.nodes]
    modules = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
    for path in modules:
        yield path, traced.model.get_submodule(path), True
    for path in dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr"):
        owner, _, name = path.rpartition(".")
        if path in traced.constants:
            yield path, traced.constants[path], False
        elif not any(path.startswith(f"{module}.") for module in modules):
            holder = traced.model.get_submodule(owner)
            yield path, getattr(holder, name), name not in holder._non_persistent_buffers_set


def _paths(attributes: list[tuple[str, Any, bool]]) -> Iterator[str]:
    """The paths of all modules, containers included."""
    for path, item, _ in attributes:
        parts = path.split(".")
        depth = len(parts) if isinstance(item, nn.Module) else len(parts) - 1
        for i in range(1, depth + 1):
            yield ".".join(parts[:i])


def _is_number(path: str) -> bool:
    return not path.rpartition(".")[2].isidentifier()


def _attach(root: nn.Module, path: str, item: Any, persistent: bool, numbered: set[str]) -> None:
    *containers, name = path.split(".")
    owner = root
    for i, part in enumerate(containers):
        if part not in owner._modules:
            has_numbers = ".".join(containers[: i + 1]) in numbered
            owner.add_module(part, nn.ModuleDict() if has_numbers else nn.Module())
        owner = owner.get_submodule(part)
    if isinstance(item, nn.Module):
        owner.add_module(name, item)
    elif isinstance(item, nn.Parameter):
        owner.register_parameter(name, item)
    else:
        owner.register_buffer(name, item, persistent)


def _compile(source: Source, name: str) -> Any:
    head = f"def compute({', '.join(['self', *source.inputs])}):\n"
    text = head + indent(source.lines, 4) + "\n"
    file = f"<layers {name}>"
    names: dict[str, Any] = {"torch": torch, "F": F, **source.objects}
    exec(compile(text, file, "exec"), names)
    # So that tracebacks show the line of the stage.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return names["compute"]
