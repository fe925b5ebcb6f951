"""Writes the stages of a traced model as source code, one Python module per stage.

The code imports only torch and computes the same as the stage.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.core.files import write_output
from plait.pipeline.cutting.check_model import StageError, check_buffers, check_stages
from plait.pipeline.cutting.constructors import NoConstructor, constructor
from plait.profiler.build import all_attributes, write_evaluation
from plait.profiler.generated_code import Source, attribute_path, indent, write_source
from plait.profiler.traced_model import Boundary, Layer, TracedModel


def write_code(traced: TracedModel, stages: Sequence[Sequence[str]], directory: Path) -> tuple[Path, ...]:
    """Write `stage_0.py`, `stage_1.py`, ... for the layers of each stage; returns the paths.

    Each holds a class `Stage` with the parameter names of the original model; its `load_model` loads its part
    of the model's state_dict. INPUTS and OUTPUTS name the values that enter and leave. Tensors that are in
    no state_dict are saved in `stage_0.pt`.
    """
    check_stages(traced, stages)
    check_buffers(traced, stages)
    return tuple(_write_stage(traced, i, len(stages), ids, directory) for i, ids in enumerate(stages))


def _write_stage(traced: TracedModel, index: int, count: int, ids: Sequence[str], directory: Path) -> Path:
    layers = traced.select(ids)
    boundary = traced.boundary(layers)
    source = write_source(traced, layers, boundary, own_inputs=True)
    constants, methods = _methods(traced, layers, boundary, source)
    path = directory / f"stage_{index}.py"
    extra = {name: item for name, item, persistent in all_attributes(traced, layers) if not persistent}
    if extra:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save({name: item.detach().cpu() for name, item in extra.items()}, path.with_suffix(".pt"))
    title = f"Stage {index} of {count} of {type(traced.model).__name__}: {layers[0].id} to {layers[-1].id}."
    lines = [
        f'"""{title}"""',
        "",
        *(["from pathlib import Path", ""] if extra else []),
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        *_imports(source),
        "",
        *constants,
        "",
        "",
        "class Stage(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        indent(_making(traced, layers), 8),
        "",
        *methods,
        "",
        "    def load_model(self, state):",
        '        """Take this stage\'s part of the whole model\'s state_dict."""',
        "        self.load_state_dict({name: state[name] for name in self.state_dict()})",
    ]
    write_output(path, "\n".join(lines) + "\n")
    return path


def _methods(
    traced: TracedModel, layers: Sequence[Layer], boundary: Boundary, source: Source
) -> tuple[list[str], list[str]]:
    """INPUTS, OUTPUTS, and `forward`, which depends on training or evaluation mode as the model does."""
    constants = [f"INPUTS = {boundary.inputs!r}", f"OUTPUTS = {boundary.outputs!r}"]
    if traced.evaluation is None:
        if traced.no_evaluation is not None:
            raise StageError(f"the model cannot be evaluated in stages: {traced.no_evaluation}")
        return constants, _method("forward", source)
    other, evaluated = write_evaluation(traced, layers, source, own_inputs=True)
    source.objects |= other.objects
    if (other.inputs, other.lines) == (source.inputs, source.lines) and evaluated == boundary:
        return constants, _method("forward", source)
    constants += [f"EVALUATION_INPUTS = {evaluated.inputs!r}", f"EVALUATION_OUTPUTS = {evaluated.outputs!r}"]
    return constants, [
        "    def forward(self, *inputs):",
        "        return (self.forward_training if self.training else self.forward_evaluation)(*inputs)",
        "",
        *_method("forward_training", source),
        "",
        *_method("forward_evaluation", other),
    ]


def _method(name: str, source: Source) -> list[str]:
    return [f"    def {name}({', '.join(['self', *source.inputs])}):", indent(source.lines, 8)]


def _imports(source: Source) -> list[str]:
    """Import statements for the user's functions and classes that the stage uses."""
    lines = []
    for name, item in source.objects.items():
        module, attribute = getattr(item, "__module__", None), getattr(item, "__name__", name)
        try:
            reached = getattr(importlib.import_module(str(module)), attribute, None)
        except ImportError:
            reached = None
        if reached is not item or module == "__main__":
            raise StageError(
                f"{attribute}, which the model uses, cannot be imported from {module!r}; "
                f"define it at the top level of an importable module"
            )
        lines.append(f"from {module} import {attribute}{'' if attribute == name else f' as {name}'}")
    return lines


def _making(traced: TracedModel, layers: Sequence[Layer]) -> list[str]:
    """Statements that create the stage's modules, parameters and buffers."""
    attributes = all_attributes(traced, layers)
    lines: list[str] = []
    made: set[str] = set()
    if any(not persistent for _, _, persistent in attributes):
        lines.append('constants = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)')
    for path, item, persistent in attributes:
        lines += _making_containers(path, made, attributes)
        if isinstance(item, nn.Module):
            lines.append(_adding(path, _module(path, item)))
        else:
            lines.append(_making_tensor(path, item, persistent))
    return lines + _tying(attributes)


def _making_containers(path: str, made: set[str], attributes: Sequence[tuple[str, Any, bool]]) -> list[str]:
    lines = []
    parts = path.split(".")[:-1]
    for i in range(1, len(parts) + 1):
        container = ".".join(parts[:i])
        if container not in made:
            made.add(container)
            numbered = any(_is_numbered_part(other, container, item) for other, item, _ in attributes)
            kind = "nn.ModuleDict()" if numbered else "nn.Module()"
            lines.append(_adding(container, kind))
    return lines


def _adding(path: str, module: str) -> str:
    if path.isdigit():  # the stage itself is not a ModuleDict
        return f'self.add_module("{path}", {module})'
    return f"{attribute_path(path, is_module=True)} = {module}"


def _is_numbered_part(path: str, container: str, item: Any) -> bool:
    """Whether `path` contains a module of `container` whose name is a number."""
    if not path.startswith(f"{container}."):
        return False
    part, _, rest = path[len(container) + 1 :].partition(".")
    return not part.isidentifier() and (bool(rest) or isinstance(item, nn.Module))


def _module(path: str, module: nn.Module) -> str:
    try:
        return constructor(module)
    except NoConstructor as reason:
        raise StageError(
            f"{path} ({type(module).__name__}) cannot be written as source: {reason}; "
            f"expected a torch.nn module as its constructor makes it"
        ) from reason


def _making_tensor(path: str, tensor: Tensor, persistent: bool) -> str:
    owner, _, name = path.rpartition(".")
    holder = attribute_path(owner, is_module=True)
    if not persistent:
        return f'{holder}.register_buffer("{name}", constants["{path}"], persistent=False)'
    dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
    empty = f"torch.empty({tuple(tensor.shape)}{dtype})"
    if not isinstance(tensor, nn.Parameter):
        return f'{holder}.register_buffer("{name}", {empty})'
    frozen = "" if tensor.requires_grad else ", requires_grad=False"
    return f'{holder}.register_parameter("{name}", nn.Parameter({empty}{frozen}))'


def _tying(attributes: Sequence[tuple[str, Any, bool]]) -> list[str]:
    """Statements that tie parameters of one stage again."""
    first: dict[int, str] = {}
    lines = []
    for path, item, _ in attributes:
        named = item.named_parameters(path) if isinstance(item, nn.Module) else [(path, item)]
        for name, parameter in named:
            if isinstance(parameter, nn.Parameter) and first.setdefault(id(parameter), name) != name:
                target = attribute_path(name, is_module=False)
                lines.append(f"{target} = {attribute_path(first[id(parameter)], is_module=False)}")
    return lines
