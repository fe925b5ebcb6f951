"""A step in a person's own loop, beside the same step of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.core.errors import PlaitError
from support.world import run_ranks


def make_model() -> nn.Module:
    # Without a bias before the norm: its gradients are rounding alone, which Adam makes as large as any.
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, content: tuple[Any, Any], wrong: Callable[[], None]
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(content[0]), content[1]).backward()
        wrong()
        optimizer.step()

    return step


def test_a_plain_step_is_plain_and_training_goes_on_from_it() -> None:
    torch.manual_seed(0)
    model, alone = make_model(), make_model()
    alone.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone)]
    for number in range(3):
        state = torch.get_rng_state()
        report = plait.audit(
            plain_step(model, optimizers[0], batch(number), lambda: None),
            model,
            optimizers[0],
            F.cross_entropy,
            batch(number),
        )
        assert report.is_equal
        assert report.largest_difference < 1e-6
        torch.set_rng_state(state)
        plain_step(alone, optimizers[1], batch(number), lambda: None)()
    for name, value in alone.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_loop_that_forgets_or_changes_something_is_told_what() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def halve() -> None:
        gradient = model[0].weight.grad
        assert gradient is not None
        gradient.mul_(0.5)

    report = plait.audit(
        plain_step(model, optimizer, batch(0), halve), model, optimizer, F.cross_entropy, batch(0)
    )
    assert [words.split(":")[0] for words in report.differences] == ["the gradient of 0.weight"]
    with pytest.raises(PlaitError, match="the step is not what plain PyTorch does: the gradient of 0.weight"):
        report.check()
    with pytest.raises(PlaitError, match="found 0 calls of optimizer.step"):
        plait.audit(lambda: None, model, optimizer, F.cross_entropy, batch(0))


def audited_under_ddp(rank: int) -> tuple[bool, bool]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(rank)
    content = (x.double(), y)
    found = []
    for wrapped in (model, inner):  # without the wrapper, gradients are this rank's own
        step = plain_step(wrapped, optimizer, content, lambda: None)
        found.append(plait.audit(step, wrapped, optimizer, F.cross_entropy, content).is_equal)
        dist.barrier()
    return found[0], found[1]


def test_ranks_that_average_their_gradients_are_audited_together() -> None:
    assert run_ranks(2, audited_under_ddp) == [(True, False)] * 2


def fused_step(
    fused: plait.FusedModule,
    optimizer: plait.FusedOptimizer,
    content: tuple[Any, Any],
    wrong: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        fused.map(F.cross_entropy, fused(content[0]), content[1]).sum().backward()
        wrong()
        optimizer.step()

    return step


@pytest.mark.parametrize(("kind", "clip_norm"), [("adamw", None), ("nadam", None), ("sgd", [0.1, 0.2, 9.0])])
def test_a_step_of_fused_trials_is_that_of_each_trial_alone(kind: str, clip_norm: Any) -> None:
    torch.manual_seed(0)
    fused = plait.fuse([make_model() for _ in range(3)], seeds=[3, 4, 5])
    optimizer = plait.FusedOptimizer(fused, kind, clip_norm, steps=[3, 1, 3], lr=[0.1, 0.01, 0.001])
    own = tuple(torch.stack(parts) for parts in zip(*(batch(seed) for seed in range(3))))
    shared = tuple(map(plait.Shared, batch(3)))
    for content in (own, shared, own):
        report = plait.audit(
            fused_step(fused, optimizer, content), fused, optimizer, F.cross_entropy, content
        )
        assert report.is_equal, str(report)
        assert report.largest_difference < 1e-5


def test_a_fused_step_that_changes_one_trial_is_told_which() -> None:
    torch.manual_seed(0)
    fused = plait.fuse([make_model() for _ in range(3)])
    optimizer = plait.FusedOptimizer(fused, "adam", lr=0.1)
    content = tuple(map(plait.Shared, batch(0)))

    def halve() -> None:
        gradient = fused.module.get_submodule("0").weight.grad
        assert isinstance(gradient, Tensor)
        gradient[1].mul_(0.5)

    step = fused_step(fused, optimizer, content, halve)
    report = plait.audit(step, fused, optimizer, F.cross_entropy, content)
    assert {words.split(":")[0] for words in report.differences} == {"trial 1"}
    assert "trial 1: the optimizer's exp_avg of 0.weight: off by" in str(report)


def test_what_cannot_be_audited_of_fused_trials_is_refused_in_words() -> None:
    fused = plait.fuse([make_model() for _ in range(2)])
    plain = torch.optim.SGD(fused.parameters(), lr=0.1)
    content = tuple(map(plait.Shared, batch(0)))
    with pytest.raises(PlaitError, match="a fused module with SGD, expected its FusedOptimizer"):
        plait.audit(lambda: None, fused, plain, F.cross_entropy, content)
    optimizer = plait.FusedOptimizer(fused, "sgd", lr=0.1)
    with pytest.raises(PlaitError, match="found 0 calls of optimizer.step"):
        plait.audit(lambda: None, fused, optimizer, F.cross_entropy, content)
    with pytest.raises(PlaitError, match="found make_model or make_optimizer with a fused module"):
        plait.audit(lambda: None, fused, optimizer, F.cross_entropy, content, make_model=make_model)
