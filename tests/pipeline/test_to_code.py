"""Written stages run without Plait and compute what the model computes."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from plait.pipeline.cutting.check_model import StageError
from plait.pipeline.cutting.to_code import write_code
from plait.profiler.trace import trace
from plait.workloads import alexnet, lstm, mlp, mobilenet, resnet, transformer, vgg
from support.further import but_further
from support.traced_models import MODELS, arguments, as_double, make, some_stages, tensors_of, tokens


def image(batch: int, size: int = 32) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 1, size, size),)


WORKLOADS: dict[str, Any] = {
    "mlp": (mlp.mlp_tiny, lambda: (torch.randn(3, 64),)),
    "alexnet": (alexnet.alexnet_tiny, lambda: image(3)),
    "vgg16": (vgg.vgg16_tiny, lambda: image(3)),
    "resnet18": (resnet.resnet18_tiny, lambda: image(3)),
    "resnet50": (resnet.resnet50_tiny, lambda: image(3)),
    "resnet56": (resnet.resnet56_tiny, lambda: image(3)),
    "mobilenet-v2": (mobilenet.mobilenet_v2_tiny, lambda: image(3)),
    "mobilenet-v3": (mobilenet.mobilenet_v3_small_tiny, lambda: image(3)),
    "lstm": (lstm.lstm_tiny, lambda: (tokens(3, 9, 256),)),
    "transformer": (transformer.transformer_tiny, lambda: (tokens(3, 9, 256),)),
}


def import_without_plait(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"written_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "plait"]:
            patch.setitem(sys.modules, name, None)
        spec.loader.exec_module(module)
    return module


def run_written(
    paths: tuple[Path, ...], model: nn.Module, values: dict[str, Any], patch: Any, training: bool = True
) -> None:
    """Run the stages one after another; what they give joins `values`."""
    state = model.state_dict()
    modules = [import_without_plait(path, patch) for path in paths]
    stages = [module.Stage() for module in modules]
    torch.manual_seed(1)
    for module, stage in zip(modules, stages):
        stage.load_model(state)
        stage.train(training)
        prefix = "" if training or not hasattr(module, "EVALUATION_INPUTS") else "EVALUATION_"
        taken, given = getattr(module, f"{prefix}INPUTS"), getattr(module, f"{prefix}OUTPUTS")
        values |= dict(zip(given, stage(*(values[name] for name in taken)), strict=True))


def assert_code_computes_the_same(model: nn.Module, inputs: Any, folder: Path, patch: Any) -> None:
    traced = trace(model, inputs)
    paths = write_code(traced, some_stages(traced, 3), folder)
    values: dict[str, Any] = dict(zip(traced.inputs, tensors_of(arguments(inputs))))
    run_written(paths, model, values, patch)
    torch.manual_seed(1)
    args, kwargs = arguments(inputs)
    expected = tensors_of(model(*args, **kwargs))
    found = tensors_of(traced.rebuild_output(values))
    torch.testing.assert_close(found, expected)
    evaluated = dict(zip(traced.inputs, tensors_of(arguments(inputs))))
    run_written(paths, model, evaluated, patch, training=False)
    assert traced.evaluation is not None
    found = tensors_of(traced.evaluation.rebuild_output(evaluated))
    torch.manual_seed(1)
    torch.testing.assert_close(found, tensors_of(copy.deepcopy(model).eval()(*args, **kwargs)))


# Their layers are those of the deeper and the newer one that stay.
MORE = {"vgg16", "resnet18", "resnet50", "resnet56", "mobilenet-v2", "mobilenet-v3"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name in MORE)) for name in WORKLOADS]
)
def test_a_workload_written_as_code_computes_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    factory, inputs = WORKLOADS[name]
    assert_code_computes_the_same(factory().double(), as_double(inputs()), tmp_path, monkeypatch)


@pytest.mark.parametrize("name", but_further(MODELS, "encoder", "masked"))
def test_a_difficult_model_written_as_code_computes_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make(name, batch=3)
    assert_code_computes_the_same(model, inputs, tmp_path, monkeypatch)


def test_written_code_reads_like_code_that_people_write(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.ReLU(inplace=True), nn.Flatten())
    traced = trace(model, (torch.randn(2, 1, 4, 4),))
    (path,) = write_code(traced, [["0", "1", "2"]], tmp_path)
    text = path.read_text()
    assert "nn.Conv2d(1, 4, 3, padding=1, bias=False)" in text
    assert "nn.ReLU(inplace=True)" in text


def test_numbered_modules_at_the_root_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    model = nn.Sequential(inner, nn.Sequential(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 2)).double()
    assert_code_computes_the_same(model, as_double((torch.randn(5, 3),)), tmp_path, monkeypatch)


def test_tied_parameters_stay_tied_in_a_written_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make("called-twice", batch=3)
    traced = trace(model, inputs)
    (path,) = write_code(traced, [[layer.id for layer in traced.layers]], tmp_path)
    stage = import_without_plait(path, monkeypatch).Stage()
    assert stage.head.weight is stage.embed.weight


def test_a_module_with_hooks_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    traced = trace(model, (torch.randn(2, 2),))
    with pytest.raises(StageError, match=r"0 \(Linear\) .* it has hooks"):
        write_code(traced, [["0"]], tmp_path)
