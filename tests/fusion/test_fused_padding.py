"""Trials with batches of unlike sizes: padded, and equal to the same trials alone on their own rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse
from torch import nn

from plait.fusion import FusedOptimizer, FusionError
from plait.fusion.dispatch.padding import pad

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
    with flat.padded([4, 2]), pytest.raises(FusionError, match="the batch is not its first axis"):
        flat(torch.randn(2, 4, 6, 8))


class TimeMajor(nn.Module):
    """The batch is the second axis inside: (time, batch, channels)."""

    def __init__(self, inside, first=nn.Identity) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(self, self.layer(x).transpose(0, 1))


def padded_pair(make, counts=(2, 4), times=5):
    """What trial 0 computes beside a trial with a larger batch, and what it computes alone."""
    torch.manual_seed(0)
    models = [make().double() for _ in range(2)]
    fused, lone = fuse(models, seeds=[1, 2]), fuse(models[:1], seeds=[1])
    x = torch.randn(2, max(counts), times, 3).double()
    with fused.padded(counts):
        return fused(x)[0, : counts[0]], lone(x[:1, : counts[0]])[0]


# As many times as rows: the sizes do not show which axis is which.
@pytest.mark.parametrize("times", [5, 4])
@pytest.mark.parametrize(
    "draw",
    [
        lambda m, y: m.drop(y),
        lambda m, y: nn.functional.dropout1d(y.transpose(1, 2), 0.5).transpose(1, 2),
        lambda m, y: y * torch.rand_like(y),
        lambda m, y: m.drop(y.unsqueeze(2)).squeeze(2),
        lambda m, y: m.drop(y.reshape(y.shape[0], -1)).view(y.shape),
    ],
)
def test_a_time_major_model_draws_as_it_does_alone(draw, times):
    found, expected = padded_pair(lambda: TimeMajor(lambda m, y: draw(m, y).transpose(0, 1)), times=times)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("times", [5, 4])
def test_a_norm_over_rows_that_are_not_outermost_is_refused(times):
    def inside(m, y):
        return m.norm(y.reshape(-1, 3)).view(y.shape).transpose(0, 1)

    with pytest.raises(FusionError, match="batch_norm mixes the rows"):
        padded_pair(lambda: TimeMajor(inside), times=times)


def test_a_time_major_model_may_come_back_to_its_rows():
    found, expected = padded_pair(lambda: TimeMajor(lambda m, y: m.norm(y[-1]) + m.norm(y.mean(0))))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_loss_over_time_major_rows_is_refused_also_after_the_forward():
    fused = fuse([TimeMajor(lambda m, y: y.reshape(-1, 3)).double() for _ in range(2)])
    with fused.padded([2, 4]):
        out = fused(torch.randn(2, 4, 5, 3).double())
        with pytest.raises(FusionError, match="mse_loss mixes the rows"):
            fused.map(F.mse_loss, out, torch.randn(2, 20, 3).double())


def test_class_weights_as_long_as_the_batch_are_no_rows():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.register_buffer("weights", torch.rand(4))

        def forward(self, x, y):
            return F.multi_margin_loss(self.layer(x), y, weight=self.weights)

    torch.manual_seed(0)
    models = [Weighted().double() for _ in range(2)]
    x, y = torch.randn(2, 4, 3).double(), torch.randint(0, 4, (2, 4))
    fused = fuse(models)
    with fused.padded([2, 4]):
        found = fused(x, y)
    assert found[0].item() == pytest.approx(models[0](x[0, :2], y[0, :2]).item(), abs=1e-12)


NOISES = {
    "like the outputs": lambda o: F.mse_loss(o, torch.randn_like(o)),
    "of their shape": lambda o: F.mse_loss(o, torch.randn(o.shape, dtype=o.dtype)),
    "dropped": lambda o: F.l1_loss(F.dropout(o), o),
    "dropped twice, time first": lambda o: F.mse_loss(
        F.dropout(F.dropout(o.transpose(0, 1))).transpose(0, 1), o
    ),
    "zeros and ones": lambda o: F.binary_cross_entropy_with_logits(o, torch.bernoulli(o.sigmoid())),
    "filled": lambda o: F.mse_loss(o, torch.empty(o.shape, dtype=o.dtype).normal_()),
}


@pytest.mark.parametrize("loss", NOISES.values(), ids=NOISES)
def test_losses_with_random_numbers_are_of_the_real_rows(loss):
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    both = fuse([nn.Identity() for _ in range(2)], seeds=[0, 1])
    with both.padded([2, 6]):
        found = both.map(loss, x)
    for number, count in enumerate((2, 6)):
        own = fuse([nn.Identity()], seeds=[number]).map(loss, x[number : number + 1, :count])
        torch.testing.assert_close(found[number], own[0], rtol=0, atol=1e-12)


class Weighs(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.weights = Weighted(), nn.Parameter(torch.arange(1.0, 9.0))

    def forward(self, x):
        return self.part(x, self.weights)


class Weighted(nn.Module):
    def forward(self, x, weights):
        return x * weights.mean()


def test_a_weight_as_long_as_the_batch_is_whole_in_an_unfused_part():
    fused, x = fuse([Weighs() for _ in COUNTS], unfused=["part"]), torch.ones(len(COUNTS), 8, 2)
    with fused.padded(COUNTS):
        found = fused(x)
    assert all((found[number, :count] == 4.5).all() for number, count in enumerate(COUNTS))
