"""Every workload has an example, which without its files is profiled, planned, cut in two and fused."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.data.calling import as_arguments
from plait.data.loader import to_device
from plait.planner.plans import Settings
from plait.profiler.profile import profile_model
from plait.schema.settings import TrainSettings
from plait.training import components
from support.stages import stages_part

ROOT = Path(__file__).parents[2]
WORKLOADS = Path(plait.__file__).parent / "workloads"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


# Cut in two and fused by other tests: tests/pipeline and tests/fusion for the image models and our own
# language models, test_transformers_jobs and test_model_loss for those of transformers, test_awd_lstm.
# SQuAD's model is that of bert-pretraining but for one layer, and that of gnmt-catalogues a larger gnmt.
ELSEWHERE = {
    "gnmt-catalogues",
    *("alexnet", "digits", "mlp", "mobilenet", "vgg"),
    *("awd-lstm", "bert", "gpt2", "lstm", "pointnet", "squad", "transformer"),
}


# Their own sizes take several times as long.
SMALLER = {
    "gnmt-catalogues": ["model_args.width=16"],
    "gnmt": ["model_args.width=16"],
}


def settings_of(example: Path) -> TrainSettings:
    words = ["data.kind=synthetic", "precision=float64", *SMALLER.get(example.stem, [])]
    settings: TrainSettings = plait.read_job(example, words).settings()
    if settings.loss == "model":
        pytest.importorskip("transformers")
    return settings


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_workload_is_profiled_planned_cut_in_two_and_fused(example: Path) -> None:
    torch.set_num_threads(1)
    settings, cpu = settings_of(example), torch.device("cpu")
    parts = components.build(settings, cpu)
    contents = parts.train_set.example_batches((4, 3), settings.seed)
    batches: list[Any] = [to_device(content, cpu, parts.dtype) for content in contents]
    inputs, target = batches[0]
    profile = profile_model(parts.model, as_arguments(inputs), lambda out: parts.loss(out, target), repeats=1)
    plan = plait.plan(profile, plait.machines(2, 1e9), Settings(straight=True))
    assert sum(len(stage.layers) for stage in plan.stages) == len(profile.graph.nodes) > 1
    if example.stem in ELSEWHERE:
        return
    assert stages_part(parts.model, batches, parts.loss) is None
    models = [components.build_model(settings.model, seed).double() for seed in range(3)]
    assert plait.fuse(models, verify=[as_arguments(inputs) for inputs, _ in batches]).trials == 3


def makes_models(path: Path) -> bool:
    """Whether a function of the module returns one of its own or torch's modules."""
    body = ast.parse(path.read_text()).body
    bases = {n.name: {ast.unparse(base) for base in n.bases} for n in body if isinstance(n, ast.ClassDef)}
    own = {name for name, found in bases.items() if "nn.Module" in found}
    made = [ast.unparse(n.returns) for n in body if isinstance(n, ast.FunctionDef) and n.returns is not None]
    return not {"nn.Sequential", "nn.Module", *own}.isdisjoint(made)


def test_every_module_that_makes_models_has_an_example_and_a_row_in_the_docs() -> None:
    named = {re.search(r"^model: ([\w.]+):(\w+)", path.read_text(), re.M): path for path in EXAMPLES}
    factories = {match.group(1): match.group(2) for match in named if match is not None}
    docs = (ROOT / "docs" / "workloads.md").read_text()
    for path in EXAMPLES:
        assert f"examples/{path.name}" in docs, path.name
    for path in WORKLOADS.rglob("*.py"):
        if not makes_models(path):
            continue
        module = ".".join(("plait", *path.relative_to(WORKLOADS.parent).with_suffix("").parts))
        package = module.rpartition(".")[0]
        assert module in factories or package in factories, f"{module} makes models and no example names it"
