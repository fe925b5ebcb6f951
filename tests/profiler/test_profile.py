"""A profile holds real times, exact bytes, and what they were measured on."""

from __future__ import annotations

import copy
import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.core.errors import ArtefactError, InputError
from plait.profiler.link_bandwidth import Link
from plait.profiler.profile import (
    SharedParameter,
    load_profile,
    profile_model,
    save_profile,
)
from plait.profiler.timing import Timed
from plait.schema.plans.graph import Tie
from plait.workloads.resnet import resnet18_tiny
from plait.workloads.transformer import transformer_tiny
from plait.workloads.vgg import vgg16_tiny
from support.further import but_further
from support.traced_models import make


class Slow(torch.autograd.Function):
    """Takes 20 ms forward and 40 ms backward, by a clock that stands still for all else."""

    seconds = 0.0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        Slow.seconds += 0.02
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        Slow.seconds += 0.04
        return grad


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: Slow.seconds)


class SlowLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x)


@pytest.mark.usefixtures("clock")
def test_time_is_charged_to_the_layer_that_takes_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), SlowLayer(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    graph = profile_model(model, (torch.randn(3, 4),), warmup=1, repeats=2).graph
    slow = graph.node_by_id["1.slow"]
    assert (slow.forward_s, slow.backward_s) == pytest.approx((0.02, 0.04))
    others = [node for node in graph.nodes if node.id != "1.slow"]
    assert sum(node.compute_s for node in others) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.usefixtures("clock")
def test_the_loss_counts_for_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    profile = profile_model(model, (torch.randn(3, 4),), lambda y: Slow.apply(y).sum(), warmup=1, repeats=2)
    first, last = profile.graph.nodes
    assert (last.forward_s, last.backward_s) == pytest.approx((0.02, 0.04))
    assert first.compute_s == pytest.approx(0.0, abs=1e-9)


class OperationsClock(TorchDispatchMode):
    """Passes by one with each operation of torch."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))

    def __call__(self) -> float:
        return float(self.operations)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        pytest.param(vgg16_tiny, lambda: torch.randn(16, 1, 32, 32), marks=pytest.mark.extended),
        pytest.param(resnet18_tiny, lambda: torch.randn(16, 1, 32, 32), marks=pytest.mark.extended),
        (transformer_tiny, lambda: torch.randint(0, 256, (8, 64))),
    ],
)
def test_the_sum_over_layers_is_near_the_whole_step(
    model: object, inputs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts operations instead of seconds; the benchmark checks 10% in seconds."""
    x = inputs()  # type: ignore[operator]
    with OperationsClock() as clock:
        monkeypatch.setattr(time, "perf_counter", clock)
        coverage = profile_model(model(), (x,), warmup=1, repeats=3).coverage  # type: ignore[operator]
    assert 0.8 < coverage < 1.25


def test_bytes_are_those_of_the_real_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4, bias=False))
    graph = profile_model(model, (torch.randn(5, 8),), warmup=0, repeats=1).graph
    linear, relu, norm, head = graph.nodes
    assert [node.parameter_bytes for node in graph.nodes] == [(8 * 16 + 16) * 4, 0, 32 * 4, 64 * 4]
    assert [node.output_bytes for node in graph.nodes] == [5 * 16 * 4] * 3 + [5 * 4 * 4]
    assert norm.buffer_bytes == 2 * 16 * 4 + 8
    assert [(e.source, e.target, e.bytes) for e in graph.edges] == [
        ("0", "1", 320),
        ("1", "2", 320),
        ("2", "3", 320),
    ]
    # Kept for backward: the input; the ReLU's result, which BatchNorm keeps too; mean and deviation;
    # BatchNorm's result.
    assert linear.activation_bytes == 5 * 8 * 4
    assert relu.activation_bytes == 320
    assert norm.activation_bytes == 2 * 16 * 4
    assert head.activation_bytes == 320
    # Who receives BatchNorm's result holds it for the layer that keeps it anyway.
    assert [edge.kept for edge in graph.edges] == [False, False, True]


def test_what_the_loss_keeps_counts_for_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False))
    target = torch.zeros(5, dtype=torch.long)
    (node,) = profile_model(
        model,
        (torch.randn(5, 8),),
        lambda output: nn.functional.cross_entropy(output, target),
        warmup=0,
        repeats=1,
    ).graph.nodes
    # The input; the logarithms of probabilities, the target and the number of samples.
    assert node.activation_bytes == 5 * 8 * 4 + 5 * 16 * 4 + 5 * 8 + 4


def test_a_tensor_that_goes_to_two_layers_has_one_name_on_both_edges() -> None:
    model, inputs = make("branches", batch=2)
    graph = profile_model(model, inputs, warmup=0, repeats=1).graph
    edges = [edge for edge in graph.edges if edge.source == "relu"]
    assert {edge.target for edge in edges} == {"left.0", "right.0", "add"}
    assert len({edge.tensor for edge in edges}) == 1
    assert graph.crossing_bytes(["stem", "relu"]) == 2 * 4 * 36 * 8


def test_a_tied_parameter_counts_once_and_is_listed() -> None:
    model, inputs = make("called-twice", batch=2)
    profile = profile_model(model, inputs, warmup=0, repeats=1)
    assert profile.graph.parameter_bytes() == sum(p.numel() * 8 for p in model.parameters())
    assert profile.graph.node_by_id["head"].parameter_bytes == 0
    assert SharedParameter("embed.weight", 11 * 6 * 8, ("embed", "head")) in profile.shared
    assert ("shared", "shared@2") in [shared.layers for shared in profile.shared]
    assert Tie(11 * 6 * 8, ("embed", "head")) in profile.graph.ties


def test_the_gradient_of_a_tied_parameter_is_no_work_of_the_layers_between() -> None:
    def working(tied: bool) -> float:
        torch.manual_seed(0)
        parts = {"embed": nn.Embedding(1000, 8), "middle": nn.Linear(8, 8), "head": nn.Linear(8, 1000, False)}
        model = nn.Sequential(OrderedDict(parts))
        if tied:
            parts["head"].weight = parts["embed"].weight
        graph = profile_model(model, (torch.arange(4),), warmup=0, repeats=1).graph
        return graph.node_by_id["middle"].working_bytes

    assert working(tied=True) == working(tied=False)


@pytest.mark.parametrize("name", but_further(("recurrent", "masked", "in-place"), "recurrent", "masked"))
def test_a_difficult_model_is_profiled_and_left_as_it_was(name: str) -> None:
    model, inputs = make(name, batch=2)
    before = copy.deepcopy(model.state_dict())
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    rng = torch.get_rng_state()
    profile = profile_model(model, inputs, warmup=1, repeats=1)
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.equal(first.grad, torch.ones_like(first))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert profile.graph.compute_s() > 0


def test_a_profile_says_what_it_was_measured_on_and_survives_a_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to(torch.float64)
    profile = profile_model(model, (torch.randn(3, 4).double(),), name="one", warmup=0, repeats=3)
    assert (profile.model, profile.dtype, profile.batch, profile.repeats) == ("one", "float64", 3, 3)
    assert profile.torch_version == torch.__version__
    assert profile.device.startswith("cpu: ")
    path = tmp_path / "one.profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    changed = json.loads(path.read_text()) | {"version": 99}
    path.write_text(json.dumps(changed))
    with pytest.raises(ArtefactError, match="version 99"):
        load_profile(path)


def test_progress_is_reported_after_every_step() -> None:
    reported: list[tuple[int, int]] = []
    model = nn.Sequential(nn.Linear(4, 4))
    profile_model(
        model,
        (torch.randn(3, 4),),
        warmup=1,
        repeats=2,
        on_progress=lambda done, total: reported.append((done, total)),
    )
    assert reported == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_loss_with_targets_can_be_given() -> None:
    target = torch.tensor([0, 1, 1])
    model = nn.Sequential(nn.Linear(4, 2))
    profile = profile_model(
        model, (torch.randn(3, 4),), lambda logits: F.cross_entropy(logits, target), repeats=1
    )
    assert profile.step.seconds > 0


def test_a_model_that_cannot_be_trained_is_refused() -> None:
    with pytest.raises(InputError, match="has no parameters"):
        profile_model(nn.ReLU(), (torch.randn(3, 4),))
    frozen = nn.Sequential(nn.Linear(4, 2)).requires_grad_(False)
    with pytest.raises(InputError, match="no tensor that requires a gradient"):
        profile_model(frozen, (torch.randn(3, 4),))
    with pytest.raises(InputError, match="0 repeats; expected at least"):
        profile_model(frozen, (torch.randn(3, 4),), repeats=0)


def test_one_tensor_is_the_only_argument() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4)
    alone, in_a_tuple = (profile_model(model, inputs, warmup=0, repeats=1) for inputs in (x, (x,)))
    assert (alone.batch, len(alone.graph.nodes)) == (in_a_tuple.batch, len(in_a_tuple.graph.nodes)) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Linear, torch.randn(3, 4)), "as the model, expected a torch.nn.Module"),
        ((nn.Linear(4, 2), 3), "found 3 as inputs, expected a tensor"),
        (
            (nn.Linear(4, 2), torch.randn(3, 4), F.cross_entropy),
            "the loss cross_entropy cannot be called: .*target",
        ),
        (
            (nn.Linear(4, 2), torch.randn(3, 4), nn.CrossEntropyLoss()),
            "such as lambda output: loss.output, target.",
        ),
        ((nn.Linear(4, 2), torch.randn(3, 4), "mse"), "found 'mse' as the loss"),
        (
            (nn.Linear(4, 2), torch.randn(3, 4), lambda y: y.mean(1)),
            r"gave a tensor of shape \(3,\), expected one",
        ),
    ],
)
def test_what_cannot_be_profiled_is_answered_with_how(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        profile_model(*arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(batch=0), "batch: found 0, expected at least 1"),
        (
            lambda p: p["graph"].update(nodes=[], edges=[]),
            "graph.nodes: found .*, expected at least one layer",
        ),
        (lambda p: p["graph"]["nodes"][0].update(parameter_bytes=1e308), "parameter_bytes: found 1e.308"),
        (lambda p: p["step"].update(seconds=0.0), "step.seconds: found 0.0, expected more than 0"),
        (lambda p: p.update(overhead_s=-1.0), "overhead_s: found -1.0, expected seconds"),
        (lambda p: p.update(loading_s=float("nan")), "loading_s: found nan, expected seconds"),
        (lambda p: p["links"][0].update(latency_s=-1.0), "links.0..latency_s: found -1.0"),
        (
            lambda p: p["links"][0].update(bytes_per_s=0.0),
            "links.0..bytes_per_s: found 0.0, expected more than 0",
        ),
        (lambda p: p["links"][0].update(source=-1), "links.0.: found .-1, 1., expected two workers"),
        (lambda p: p["spreads"][0].update(forward_s=-1.0), "spreads: found .-1.0"),
    ],
)
def test_a_profile_that_nobody_can_have_measured_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "one.profile.json"
    found = profile_model(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4), warmup=0, repeats=1)
    save_profile(found.with_links((Link(0, 1, 1e9, 1e-4, True),)), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=words) as caught:
        load_profile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_spread_is_the_middle_half() -> None:
    assert Timed.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Timed(3.0, 2.0)
    assert Timed.of([1.0]) == Timed(1.0, 0.0)
