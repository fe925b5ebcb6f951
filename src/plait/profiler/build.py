"""Builds a runnable module from layers of a traced model."""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.profiler.arguments import read_value
from plait.profiler.generated_code import Source, indent, write_source
from plait.profiler.trace_errors import TraceError
from plait.profiler.traced_model import Boundary, Layer, TracedModel


@dataclass(frozen=True)
class LayersCode:
    """The compiled code of some layers, for training and for evaluation mode.

    `values` are the inputs that are numbers or text. `no_evaluation` is why there is none for evaluation.
    """

    train: Any
    values: frozenset[int]
    evaluate: Any
    evaluated_values: frozenset[int]
    no_evaluation: str | None = None

    def run(self, module: nn.Module, inputs: Iterable[Any]) -> tuple[Tensor, ...]:
        """The output values of the layers, with the tensors and in the mode of `module`."""
        if not module.training and self.no_evaluation is not None:
            raise TraceError(f"the model cannot be evaluated in stages: {self.no_evaluation}")
        compute, values = (
            (self.train, self.values) if module.training else (self.evaluate, self.evaluated_values)
        )
        if values:
            inputs = (read_value(each) if i in values else each for i, each in enumerate(inputs))
        result: tuple[Tensor, ...] = compute(module, *inputs)
        return result


class ModelSlice(nn.Module):
    """Parameters, buffers and modules of a model: the original objects, under their original names."""

    def __init__(self, attributes: Sequence[tuple[str, Any, bool]]) -> None:
        super().__init__()
        numbered = {path.rpartition(".")[0] for path in _paths(attributes) if _is_number(path)}
        for path, item, persistent in attributes:
            _attach(self, path, item, persistent, numbered)


class LayersModule(ModelSlice):
    """Some layers of a model: takes their input values, returns a tuple of their output values."""

    def __init__(self, code: LayersCode, attributes: Sequence[tuple[str, Any, bool]]) -> None:
        super().__init__(attributes)
        self._code = code

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._code.run(self, inputs)


class StagesModule(ModelSlice):
    """Several stages of a model as one module, in which a tensor that they share is one.

    Its first argument is the number of the stage that computes.
    """

    def __init__(self, codes: Mapping[int, LayersCode], attributes: Sequence[tuple[str, Any, bool]]) -> None:
        super().__init__(attributes)
        self.codes = codes

    def forward(self, stage: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.codes[stage].run(self, inputs)


def build(
    traced: TracedModel, layers: tuple[Layer, ...], boundary: Boundary, own_inputs: bool
) -> LayersModule:
    """`layers` as one module over the model's parameters; see `write_source` for `own_inputs`."""
    attributes = all_attributes(traced, layers)
    module = LayersModule(_code_of(traced, layers, boundary, own_inputs, _modules(attributes)), attributes)
    module.training = traced.model.training  # submodules keep their modes
    return module


def build_stages(
    traced: TracedModel,
    stages: Mapping[int, tuple[Layer, ...]],
    codes: Mapping[int, LayersCode] | None = None,
) -> StagesModule:
    """Several stages as one module over the model's parameters, by their numbers.

    `codes` are those of the same stages of another model.
    """
    attributes = all_attributes(traced, [layer for layers in stages.values() for layer in layers])
    if codes is None:
        modules = _modules(attributes)
        codes = {
            number: _code_of(traced, layers, traced.boundary(layers), True, modules)
            for number, layers in stages.items()
        }
    module = StagesModule(codes, attributes)
    module.training = traced.model.training
    return module


def _modules(attributes: Iterable[tuple[str, Any, bool]]) -> list[str]:
    return [path for path, item, _ in attributes if isinstance(item, nn.Module)]


def _code_of(
    traced: TracedModel,
    layers: tuple[Layer, ...],
    boundary: Boundary,
    own_inputs: bool,
    modules: Collection[str],
) -> LayersCode:
    source = write_source(traced, layers, boundary, own_inputs, modules=modules)
    name = layers[0].id if len(layers) == 1 else f"{layers[0].id} to {layers[-1].id}"
    train = _compile(source, name)
    if traced.evaluation is None:
        return LayersCode(train, source.values, train, source.values, traced.no_evaluation)
    evaluation, _ = write_evaluation(traced, layers, source, own_inputs, modules)
    return LayersCode(train, source.values, _compile(evaluation, f"{name}, evaluation"), evaluation.values)


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


def _paths(attributes: Iterable[tuple[str, Any, bool]]) -> Iterator[str]:
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
