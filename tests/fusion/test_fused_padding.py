"""Trials with batches of unlike sizes: padded, and equal to the same trials alone on their own rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.fusion import FusedOptimizer, FusionError, fuse
from plait.fusion.padding import pad

COUNTS = [5, 8, 2, 1]


def norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


class Sequences(nn.Module):
    """Rows of a batch become several rows of a batch norm, as in a model over time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x.flatten(0, 1))).view(*x.shape[:2], 3)


def alone(model, x, y, loss, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
    return value.detach(), model.state_dict()


def together(models, xs, ys, loss, steps=3):
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    x, y = pad(xs, max(COUNTS)), pad(ys, max(COUNTS))
    for _ in range(steps):
        optimizer.zero_grad()
        with fused.padded(COUNTS):
            values = fused.map(loss, fused(x), y)
        values.sum().backward()
        optimizer.step()
    return values.detach(), [model.state_dict() for model in fused.split()]


def flat_cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=0.1)


LOSSES = {
    "cross entropy": (F.cross_entropy, "classes"),
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), "classes"),
    "class weights": (
        lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 3.0]).double()),
        "classes",
    ),
    "negative log": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t), "classes"),
    "squares": (F.mse_loss, "numbers"),
    "probabilities": (lambda o, t: F.cross_entropy(o, t.softmax(1)), "numbers"),
    "divergence": (
        lambda o, t: F.kl_div(F.log_softmax(o, 1), t.softmax(1), reduction="batchmean"),
        "numbers",
    ),
    "a module": (nn.SmoothL1Loss(), "numbers"),
}


def targets(kind, count):
    return torch.randint(0, 3, (count,)) if kind == "classes" else torch.randn(count, 3).double()


@pytest.mark.parametrize("name", LOSSES)
def test_padded_trials_equal_the_same_trials_alone(name):
    torch.manual_seed(0)
    loss, kind = LOSSES[name]
    # A batch of one row has no variance that a norm over rows alone could use.
    counts = [count for count in COUNTS if count > 1]
    models = [norm_net() for _ in counts]
    xs = [torch.randn(count, 1, 4, 4).double() for count in counts]
    ys = [targets(kind, count) for count in counts]
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with fused.padded(counts):
            values = fused.map(loss, fused(pad(xs, 8)), pad(ys, 8))
        values.sum().backward()
        optimizer.step()
    for model, one, value, x, y in zip(models, fused.split(), values, xs, ys):
        expected, weights = alone(model, x, y, loss)
        assert value.item() == pytest.approx(expected.item(), abs=1e-12)
        for key, found in one.state_dict().items():
            assert torch.allclose(found, weights[key], rtol=0, atol=1e-10), key


def test_rows_that_became_several_keep_their_padding_apart():
    torch.manual_seed(1)
    models = [Sequences().double() for _ in COUNTS]
    xs = [torch.randn(count, 6, 4).double() for count in COUNTS]
    ys = [torch.randint(0, 3, (count, 6)) for count in COUNTS]
    values, states = together(models, xs, ys, flat_cross_entropy)
    for model, state, value, x, y in zip(models, states, values, xs, ys):
        expected, weights = alone(model, x, y, flat_cross_entropy)
        assert value.item() == pytest.approx(expected.item(), abs=1e-12)
        assert all(torch.allclose(state[key], weights[key], rtol=0, atol=1e-10) for key in weights)


def test_an_unfused_part_sees_its_own_rows_too():
    torch.manual_seed(2)
    models = [Sequences().double() for _ in COUNTS]
    fused = fuse(models, unfused=["norm"])
    x = pad([torch.randn(count, 6, 4).double() for count in COUNTS], 8)
    with fused.padded(COUNTS):
        fused(x)
    for model, one, own, count in zip(models, fused.split(), x, COUNTS):
        model(own[:count])
        assert torch.allclose(one.norm.running_var, model.norm.running_var, rtol=0, atol=1e-12)


def test_dropout_is_that_of_the_trial_alone_and_padding_changes_nothing():
    models = [nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)).double() for _ in range(2)]
    x = torch.randn(2, 8, 4).double()
    fused, lone = fuse(models, seeds=[3, 4]), fuse(models[:1], seeds=[3])
    with fused.padded([5, 8]):
        padded = fused(x)
    assert torch.equal(padded[0, :5], lone(x[:1, :5])[0])


def test_counts_that_do_not_fit_are_refused():
    fused = fuse([Sequences(), Sequences()])
    with pytest.raises(FusionError, match="found 3 counts of rows for 2 trials"), fused.padded([1, 2, 3]):
        pass
    with pytest.raises(FusionError, match=r"found \[0, 2\] rows"), fused.padded([0, 2]):
        pass
    flat = fuse([nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(0, (3, -1)), nn.BatchNorm1d(8))] * 2)
    with flat.padded([4, 2]), pytest.raises(FusionError, match="mixes 3 rows"):
        flat(torch.randn(2, 4, 6, 8))
