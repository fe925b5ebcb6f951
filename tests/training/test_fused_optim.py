"""Optimizers of jobs step with torch's fused kernels on CPUs, and train as the plain formulas do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from plait.pipeline.named_state import load_optimizer_state, optimizer_state
from plait.pipeline.updates.weight_stash import WeightVersions
from plait.schema.settings import OptimizerSettings
from plait.training.checkpoint import Checkpoint, load, save
from plait.training.optimizers.build import build_optimizer
from plait.verification.reference_optimizer import OptimizerTwin

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "decay": ("sgd", {"lr": 0.1, "weight_decay": 1e-2, "maximize": True}),
    "adam": ("adam", {"lr": 0.01, "weight_decay": 1e-2}),
    "amsgrad": ("adam", {"lr": 0.01, "amsgrad": True, "betas": [0.8, 0.99]}),
    "adamw": ("adamw", {"lr": 0.01, "maximize": True}),
    "adagrad": ("adagrad", {"lr": 0.1, "lr_decay": 0.1}),
}
PLAIN = {"fused": False}


class FusedKernels(TorchDispatchMode):
    """Counts the calls of fused kernels while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "_fused_" in str(func)
        return func(*args, **(kwargs or {}))


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (5,), (4, 3, 2, 2), (6, 1, 1, 3), ()]
    return [Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


def gradients() -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in weights()]


def step(optimizer: torch.optim.Optimizer, grads: list[Any]) -> int:
    """Take a step with `grads`; how many fused kernels it called."""
    (group,) = optimizer.param_groups
    for parameter, grad in zip(group["params"], grads, strict=True):
        parameter.grad = grad
    with FusedKernels() as kernels:
        optimizer.step()
    return kernels.calls


def make(case: str, **more: Any) -> tuple[list[Parameter], torch.optim.Optimizer]:
    kind, options = CASES[case]
    own = weights()
    return own, build_optimizer(OptimizerSettings(kind, {**options, **more}), own)


def assert_same(first: list[Parameter], second: list[Parameter]) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_fused_steps_train_as_plain_ones_do_under_a_changing_rate(case: str):
    (own, fused), (expected, plain) = make(case), make(case, **PLAIN)
    for rate, grads in zip((0.1, 0.05, 0.2, 0.01), gradients()):
        for optimizer in (fused, plain):
            optimizer.param_groups[0]["lr"] = rate
        assert step(fused, [g.clone() for g in grads]) == 1
        assert step(plain, grads) == 0
    assert_same(own, expected)


def adamw_as_the_user_wants(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, **options)


class OwnSgd(torch.optim.SGD):
    """Its step may do anything with the parameters."""


@pytest.mark.parametrize(
    ("kind", "options", "calls"),
    [
        ("test_fused_optim:adamw_as_the_user_wants", {}, 1),
        ("test_fused_optim:adamw_as_the_user_wants", {"foreach": False}, 0),
        ("test_fused_optim:OwnSgd", {"lr": 0.1, "momentum": 0.9}, 0),
        ("adam", {"fused": False}, 0),
        ("adam", {"foreach": True}, 0),
        ("adam", {"differentiable": True}, 0),
        ("adam", {"fused": True}, 1),
        ("rmsprop", {}, 0),
        # One pass already, which stages write their next version with and copy nothing.
        ("sgd", {"lr": 0.1}, 0),
    ],
)
def test_options_that_choose_the_kernel_are_kept(kind: str, options: dict[str, Any], calls: int):
    optimizer = build_optimizer(
        OptimizerSettings(kind, options), [Parameter(torch.ones(3), requires_grad=False)]
    )
    assert step(optimizer, [torch.ones(3)]) == calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_types_that_fused_kernels_round_otherwise_or_refuse_step_plainly(dtype: torch.dtype):
    optimizer = build_optimizer(OptimizerSettings("adam"), [Parameter(torch.ones(3, dtype=dtype))])
    assert step(optimizer, [torch.ones(3, dtype=dtype)]) == 0


def turned(tensor: Tensor) -> Tensor:
    """The same values, the last axis first in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1) if tensor.dim() > 1 else tensor


@pytest.mark.parametrize("case", ["decay", "momentum", "adam", "adagrad"])
@pytest.mark.parametrize("where", ["weights", "gradients", "first gradients", "both"])
def test_weights_and_gradients_that_lie_unlike_in_memory_are_no_trouble(case: str, where: str):
    (own, fused), (expected, plain) = make(case), make(case, **PLAIN)
    if where in ("weights", "both"):
        for parameter in own:
            parameter.data = turned(parameter.data)
    # A momentum is laid out as the first gradient, whatever the later ones are.
    turn = {"weights": 0, "gradients": 4, "first gradients": 1, "both": 4}[where]
    for number, grads in zip(range(4), gradients()):
        step(fused, [turned(g) if number < turn else g.clone() for g in grads])
        step(plain, grads)
    assert_same(own, expected)


def test_strides_along_axes_of_one_make_no_difference():
    parameter = Parameter(torch.empty_strided((5, 1), (1, 5)).zero_())
    optimizer = build_optimizer(OptimizerSettings("adam"), [parameter])
    assert step(optimizer, [torch.ones(5, 1)]) == 1


@pytest.mark.parametrize("case", ["momentum", "adam"])
def test_parameters_that_get_gradients_later_than_others_join_in(case: str):
    (own, fused), (expected, plain) = make(case), make(case, **PLAIN)
    calls = []
    for late, grads in zip((True, True, False, False, True), gradients()):
        present = [None if late and place % 2 else g for place, g in enumerate(grads)]
        calls.append(step(fused, [None if g is None else g.clone() for g in present]))
        step(plain, present)
    assert_same(own, expected)
    assert calls == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("case", ["nesterov", "adam"])
def test_a_fused_step_leaves_the_version_before_to_those_that_use_it(case: str):
    (own, fused), (expected, plain) = make(case), make(case, **PLAIN)
    versions = WeightVersions(nn.ParameterList(own), own)
    for grads in itertools.islice(gradients(), 3):
        before = versions.leaves(versions.newest)
        values = [leaf.detach().clone() for leaf in before]
        versions.use(versions.newest)
        step(plain, grads)
        for master, grad in zip(own, grads):
            master.grad = grad
        with FusedKernels() as kernels:
            versions.update(fused.step, versions.newest)
        assert kernels.calls == 1
        assert all(map(torch.equal, before, values))
    assert_same(own, expected)


class Sparse(nn.Module):
    """Rows that get sparse gradients before a dense layer."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, width, sparse=True)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.rows(x))
        return out


# A single number has the same strides whether it is sparse or not.
@pytest.mark.parametrize(("rows", "width"), [(6, 3), (1, 1)])
@pytest.mark.parametrize(("kind", "options"), [("sgd", {"momentum": 0.9}), ("adagrad", {})])
def test_sparse_gradients_train_as_with_plain_steps(
    kind: str, options: dict[str, Any], rows: int, width: int
):
    models = []
    for more in ({}, PLAIN):
        torch.manual_seed(0)
        model = Sparse(rows, width).double()
        optimizer = build_optimizer(
            OptimizerSettings(kind, {"lr": 0.1, **options, **more}), model.parameters()
        )
        for number in range(4):
            optimizer.zero_grad()
            model(torch.tensor([number % rows, (number + 1) % rows, 0])).square().sum().backward()
            assert model.rows.weight.grad.is_sparse
            optimizer.step()
        models.append(list(model.parameters()))
    assert_same(*models)


def test_a_first_step_that_the_loss_scale_skips_leaves_no_momentum():
    found = []
    for more in ({}, PLAIN):
        own = [Parameter(torch.ones(1000))]
        optimizer = build_optimizer(OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9, **more}), own)
        scaler = torch.amp.GradScaler("cpu")
        for factor in (1e36, 2.0, 3.0):
            optimizer.zero_grad()
            scaler.scale((own[0] * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor == 1e36:
                assert not optimizer.state
        found.append(own)
    torch.testing.assert_close(found[0][0], found[1][0])


@pytest.mark.parametrize("case", ["nesterov", "amsgrad", "adagrad"])
@pytest.mark.parametrize("first", ["fused", "plain"])
def test_a_checkpoint_of_one_kind_of_step_goes_on_with_the_other(case: str, first: str, tmp_path: Path):
    ways = [{}, PLAIN] if first == "fused" else [PLAIN, {}]
    (expected, whole), (own, before) = make(case, **PLAIN), make(case, **ways[0])
    for grads in itertools.islice(gradients(), 3):
        step(before, [g.clone() for g in grads])
        step(whole, grads)
    names = {p: f"weight{place}" for place, p in enumerate(own)}
    saved = load(save(tmp_path, Checkpoint(3, {}, optimizer_state(before, names), {})))
    resumed, after = make(case, **ways[1])
    for parameter, value in zip(resumed, own):
        parameter.data = value.data.clone()
    load_optimizer_state(after, {p: names[q] for p, q in zip(resumed, own)}, saved.optimizer)
    for grads in itertools.islice(gradients(), 3):
        assert step(after, [g.clone() for g in grads]) == (0 if ways[1] else 1)
        step(whole, grads)
    assert_same(resumed, expected)


def test_weights_that_lie_turned_take_plain_steps() -> None:
    """The kernels compute the same, but take more than twice the time of plain steps."""
    (expected, plain), (own, open_) = make("nesterov", **PLAIN), make("nesterov")
    for parameter in own:
        parameter.data = turned(parameter.data)
    for grads in itertools.islice(gradients(), 3):
        assert step(open_, [turned(g) for g in grads]) == 0
        step(plain, grads)
    assert_same(own, expected)


def test_a_twin_steps_with_the_kernels_of_a_parameter_that_moves_for_the_first_time() -> None:
    settings = OptimizerSettings("sgd", {"lr": 0.1, "momentum": 0.9})
    first, late = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = build_optimizer(settings, [first, late])
    first.grad = torch.ones_like(first)
    optimizer.step()
    names = {first: "first", late: "late"}
    twin = OptimizerTwin(
        optimizer, names, lambda own: build_optimizer(settings, own, plain=True), lambda _: None
    )
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert twin.updates == 1
    assert list(twin.differences()) == []
