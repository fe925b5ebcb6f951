"""A fused module: what enters, what leaves, what each trial keeps to itself, and what is refused."""

from __future__ import annotations

import copy
import operator
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CLOSE, alone, assert_equals_lone_models, fuse, make_models
from torch import nn
from torch.distributions import Beta, Categorical, Exponential, Laplace, Normal, Uniform
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import plait
from plait.fusion import FusedOptimizer, FusionError, Shared, group_by_shape
from plait.fusion.dispatch import random
from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.dispatch.random import Streams
from plait.fusion.forward_patches import Patch
from plait.fusion.trials.single_trial import SingleTrialMode


class Decides(nn.Module):
    """Looks at a value in Python, and draws once or twice accordingly."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        y = self.drop(self.layer(x))
        if y.sum() > 0:  # the line that an error should name
            y = self.drop(y * 2)
        return y


class Remembers(nn.Module):
    """Re-assigns one buffer and writes into another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", None)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.count += 1
        self.last = y.detach()[0]
        return y - self.average


class Drops(nn.Module):
    def __init__(self, p=0.4):
        super().__init__()
        self.input = nn.Dropout(p)
        self.layer = nn.Linear(6, 6)
        self.alpha = nn.AlphaDropout(p)
        self.channels = nn.Dropout1d(p)

    def forward(self, x):
        y = self.alpha(self.layer(self.input(x)))
        y = self.channels(y.unsqueeze(-1)).squeeze(-1)
        return y + 0.1 * torch.randn_like(y) + torch.rand(6, dtype=y.dtype)


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_buffers_that_a_model_assigns_anew_follow_each_trial():
    models = make_models(Remembers)
    assert_equals_lone_models(models, [(data(4, 3),) for _ in models])
    fused = fuse(models)
    fused(data(3, 4, 3))
    fused(data(3, 4, 3))
    assert [trial.count.item() for trial in fused.split()] == [3, 3, 3]


class Keeps(nn.Module):
    """Leaves what it computed in a plain attribute, and uses it the next time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.before = None

    def forward(self, x):
        y = self.layer(x) if self.before is None else self.layer(x) + self.before.detach()
        self.before = y
        return y


def test_what_a_forward_leaves_in_an_attribute_is_each_trials_own():
    models = make_models(Keeps)
    fused = fuse(models)
    x = data(3, 2, 3)
    fused(x)
    together = fused(x)
    for number, model in enumerate(models):
        model(x[number])
        torch.testing.assert_close(together[number], model(x[number]), **CLOSE)
        torch.testing.assert_close(fused.trial(number).before, model.before, **CLOSE)


def test_tied_weights_stay_tied():
    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    models = make_models(tied)
    assert_equals_lone_models(models, [(data(2, 4),) for _ in models])
    fused = fuse(models)
    assert fused.module[0].weight is fused.module[2].weight
    assert all(trial[0].weight is trial[2].weight for trial in fused.split())


def test_shared_data_gives_what_copies_of_it_give():
    models = make_models(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    )
    x = data(5, 2, 4, 4)
    shared, copied = fuse(models), fuse(models)
    torch.testing.assert_close(shared(Shared(x)), copied(x.expand(3, *x.shape)), **CLOSE)


def test_an_input_without_the_trials_axis_is_refused_with_its_shape():
    fused = fuse(make_models(lambda: nn.Linear(4, 2)))
    with pytest.raises(FusionError, match=r"shape \(5, 4\).*\(3, \.\.\.\).*Shared"):
        fused(data(5, 4))


def test_a_trial_drops_the_same_elements_alone_and_with_others():
    models = make_models(Drops)
    fused, singles = fuse(models), alone(models)
    for _ in range(3):
        x = data(3, 8, 6)
        together = fused(x)
        for number, single in enumerate(singles):
            torch.testing.assert_close(together[number], single(x[number : number + 1])[0], **CLOSE)


def test_trials_differ_in_what_they_drop_and_forwards_do_too():
    fused = fuse([nn.Dropout(0.5), nn.Dropout(0.5)])
    ones = torch.ones(2, 1000)
    first, second = fused(ones), fused(ones)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0])


def test_two_dropouts_of_one_forward_drop_different_elements():
    fused = fuse([nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])])
    first, second = fused.call(lambda parts, x: [part(x) for part in parts], torch.ones(1, 1000))
    assert 0.4 < (first == second).float().mean() < 0.6


def test_dropout_keeps_the_share_each_trial_asks_for():
    fused = fuse([nn.Dropout(0.0), nn.Dropout(0.2), nn.Dropout(0.9), nn.Dropout(1.0)])
    y = fused(torch.ones(4, 40_000))
    torch.testing.assert_close((y > 0).float().mean(1), torch.tensor([1.0, 0.8, 0.1, 0.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(y[1].max(), torch.tensor(1.25))
    assert [trial.p for trial in fused.split()] == [0.0, 0.2, 0.9, 1.0]


def test_random_words_are_uniform_and_uncorrelated():
    fused = fuse([nn.Identity(), nn.Identity()])
    drawn = fused.map(lambda x: torch.rand_like(x), torch.ones(2, 100_000, dtype=torch.float64))
    counts = torch.histc(drawn[0].float(), 64, 0, 1)
    assert ((counts - 100_000 / 64).square() / (100_000 / 64)).sum() < 120  # chi squared, 63 degrees
    centred = drawn - drawn.mean(1, keepdim=True)
    neighbours = (centred[0, 1:] * centred[0, :-1]).mean() / centred[0].square().mean()
    trials = (centred[0] * centred[1]).mean() / centred[0].square().mean()
    assert max(neighbours.abs(), trials.abs()) < 0.02
    normal = fused.map(lambda x: torch.randn_like(x), torch.ones(2, 100_000))
    assert normal.mean().abs() < 0.01
    assert abs(normal.std() - 1) < 0.01


def draws_of_steps(fused, optimizer, steps):
    """What is drawn before each forward, in it, after it, and in an evaluation, twice each."""
    x = torch.ones(fused.trials, 8, dtype=torch.float64)
    drawn = []

    def draw_twice(call):
        drawn.extend(call() for _ in range(2))

    for _ in range(steps):
        draw_twice(lambda: fused.map(torch.rand_like, x))
        for _ in range(2):  # as when gradients are accumulated
            drawn.append(fused.call(lambda _, x: torch.rand_like(x), x))
            draw_twice(lambda: fused.map(torch.rand_like, x))
        optimizer.step()
        fused.eval()
        draw_twice(lambda: fused.call(lambda _, x: torch.rand_like(x), x))
        draw_twice(lambda: fused.map(torch.rand_like, x))
        fused.train()
    return drawn


def test_no_two_calls_draw_alike_and_a_step_draws_what_its_number_says():
    def fused_from(step, seeds):
        fused = fuse([nn.Linear(4, 4) for _ in seeds], seeds, rng_steps=[step] * len(seeds))
        return fused, FusedOptimizer(fused, "sgd", lr=0.1)

    drawn = draws_of_steps(*fused_from(0, [5, 7]), 3)
    numbers = torch.cat(drawn, 1)
    assert all(len(trial.unique()) == trial.numel() for trial in numbers)
    later = draws_of_steps(*fused_from(2 * 2, [7]), 1)  # as after a resume, and alone
    assert torch.equal(torch.cat(later), torch.cat(drawn[-len(later) :])[1::2])


def test_fused_modules_draw_unlike_numbers_unless_their_seeds_are_given():
    first, second, again = (plait.fuse([nn.Identity()], seeds=s, verify=False) for s in (None, None, [0]))
    x, drawn = torch.ones(1, 8), [each.map(torch.rand_like, torch.ones(1, 8)) for each in (first, second)]
    assert not torch.equal(*drawn)
    again.load_state_dict(first.state_dict())
    assert torch.equal(again.map(torch.rand_like, x), drawn[0])


def test_draws_that_repeat_are_computed_at_once_and_are_those_of_each_call(monkeypatch):
    seeds, steps = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    computed, scrambled = [], random._scrambled
    monkeypatch.setattr(random, "_scrambled", lambda *keys: computed.append(1) or scrambled(*keys))

    def forward(step, after, shapes=((3, 4), (5,), (2, 1))):
        made, plain = Streams(seeds, steps + step, 0, after), Streams(seeds, steps + step)
        computed.clear()
        found = [made.bits(shape) for shape in shapes]
        counted = len(computed)
        assert all(torch.equal(one, plain.bits(shape)) for one, shape in zip(found, shapes))
        return Streams(seeds, steps, 0, made), counted  # a loss draws nothing

    after, counts = None, []
    for step in range(4):
        after, count = forward(step, after)
        counts.append(count)
    assert counts == [3, 3, 1, 1]
    after, count = forward(4, after, ((3, 4), (6,), (2, 1)))
    assert count == 2  # what was not expected, and what was
    assert forward(5, after)[1] == 2  # what the last two have drawn, and what only this one draws


def filled(x):
    noise = torch.empty(x.shape[0], 1, dtype=x.dtype)
    noise.bernoulli_(0.5)
    noise[:, :] = noise.div_(0.5)
    return x * noise.expand(-1, x.shape[1])


DROP_PATHS = {
    "a tensor of the trials": lambda x: x * x.new_empty((x.shape[0], 1)).bernoulli_(0.5).div_(0.5),
    "a new tensor": lambda x: x * torch.empty((x.shape[0], 1), dtype=x.dtype).bernoulli_(p=0.5).div_(0.5),
    "a new tensor by its name": filled,
    "probabilities": lambda x: x * torch.bernoulli(x.sigmoid()),
    "probabilities that trials share": lambda x: x * torch.full((4,), 0.5, dtype=x.dtype).bernoulli(),
}


@pytest.mark.parametrize("drop", DROP_PATHS.values(), ids=DROP_PATHS)
def test_each_trial_draws_its_own_zeros_and_ones_as_it_does_alone(drop):
    models = make_models(lambda: nn.Linear(4, 4))
    fused, singles = fuse(models), alone(models)
    x = data(3, 6, 4)
    run = lambda layer, x: drop(layer(x)) + drop(x)  # noqa: E731
    for _ in range(2):
        together = fused.call(run, x)
        assert not torch.equal(together[0] == 0, together[1] == 0)
        for number, (single, model) in enumerate(zip(singles, models)):
            streams = Streams(single.seeds, single.ages.clone())
            torch.testing.assert_close(together[number], single.call(run, x[number : number + 1])[0], **CLOSE)
            with SingleTrialMode(streams):
                torch.testing.assert_close(together[number], run(model, x[number]), **CLOSE)


def test_zeros_and_ones_are_drawn_with_their_probability_and_have_a_gradient_of_zeros():
    fused = fuse([nn.Identity(), nn.Identity()])
    chances = torch.tensor([0.0, 0.3, 1.0]).expand(2, 20_000, 3).clone().requires_grad_()
    drawn = fused.map(torch.bernoulli, chances)
    torch.testing.assert_close(drawn.mean(1), chances[:, 0].detach(), atol=0.02, rtol=0)
    drawn.sum().backward()
    assert not chances.grad.any()
    with pytest.raises(RuntimeError, match="1.5"):
        fused.map(lambda x: x.detach().clone().bernoulli_(1.5), chances)


def test_a_part_of_a_tensor_of_anothers_is_not_filled_with_numbers_of_the_trials():
    fused, whole = fuse([nn.Identity(), nn.Identity()]), torch.zeros(4, 4)
    with pytest.raises(FusionError, match=r"draws from torch's generator \(bernoulli_\).*into a new tensor"):
        fused.map(lambda x: x + whole[0].bernoulli_(0.5), torch.zeros(2, 4))
    assert not whole.any()


shared_waits = Exponential(torch.tensor(0.5, dtype=torch.float64))


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def partly_noisy(x):
    noise = torch.zeros(x.shape, dtype=x.dtype)
    noise[:, 1].normal_(1.0, 2.0)
    return x + noise


def crossed(x):
    return torch.where(torch.rand(x.shape[0], 1) < 0.5, x[torch.randperm(len(x))], x)


DRAWS = {
    "normal": lambda x: x + torch.empty_like(x).normal_(1.0, std=0.5),
    "normal, new": lambda x: x + torch.empty(x.shape, dtype=x.dtype).normal_(),
    "normal, a part": partly_noisy,
    "normal, of two": lambda x: x + torch.normal(x, x.abs()),
    "normal, of one": lambda x: x + torch.normal(mean=2.0, std=x.abs()) + torch.normal(x, 0.5),
    "normal, that trials share": lambda x: x * torch.normal(torch.ones(4), torch.ones(4)).to(x.dtype),
    "normal, of a size": lambda x: x * torch.normal(1.0, 0.5, x.shape),
    "uniform": lambda x: x * x.new_empty(x.shape).uniform_(-2, 3),
    "exponential": lambda x: x * torch.empty(4, dtype=x.dtype).exponential_(0.5),
    "whole numbers": lambda x: x * torch.randint(-3, 9, (len(x), 1)),
    "whole numbers by name": lambda x: x * torch.randint(high=9, size=(4,), dtype=torch.int32),
    "whole numbers alike": lambda x: x * torch.randint_like(x, 2, 9) + torch.randint_like(x, 4),
    "orders": crossed,
    "one of several": lambda x: x + torch.multinomial(x.softmax(-1), 1),
    "some of several": lambda x: x[:, :3] + torch.multinomial(x.softmax(-1), 3),
    "some, again and again": lambda x: x + torch.multinomial(x.softmax(-1), 4, replacement=True),
    "some of which trials share": lambda x: x + torch.multinomial(torch.ones(9), 4),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True) * x,
    "gumbel softmax that trials share": lambda x: F.gumbel_softmax(torch.ones(6, 4, dtype=x.dtype)) * x,
    "numbers of 32 bits and more": lambda x: x + torch.randint(0, 2**40, (4,)) * 2.0**-40,
    "complex numbers": lambda x: x * torch.randn(4, dtype=torch.complex128).imag,
    "within an autograd function": lambda x: Draws.apply(x),
    "twice from what trials share": lambda x: x + shared_waits.sample((4,)) - shared_waits.sample((6, 1)),
    "distributions": lambda x: Normal(x, x.exp()).rsample() + Categorical(logits=x).sample()[:, None],
    "more distributions": lambda x: Laplace(x, 1.0).rsample() + Uniform(x, x + 1).sample(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_trial_draws_its_own_numbers_as_it_does_alone(draw):
    models = make_models(lambda: nn.Linear(4, 4))
    fused, singles = fuse(models), alone(models)
    x = data(3, 6, 4)
    run = lambda layer, x: draw(layer(x))  # noqa: E731
    before = torch.get_rng_state()
    for _ in range(2):
        together = fused.call(run, x)
        with torch.no_grad():
            assert (together - fused.call(run, x[:1].expand(3, -1, -1)))[0].any()  # of another step
        fused.ages -= 1
        for number, (single, model) in enumerate(zip(singles, models)):
            torch.testing.assert_close(together[number], single.call(run, x[number : number + 1])[0], **CLOSE)
            with SingleTrialMode(Streams(single.seeds, single.ages - 1)):
                torch.testing.assert_close(together[number], run(model, x[number]), **CLOSE)
        together.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


class Scaled(nn.Module):
    def __init__(self, std):
        super().__init__()
        self.std = std

    def forward(self, x):
        return x + torch.normal(0.0, self.std, size=(4,)) + torch.empty(4).normal_(0.0, self.std)


def test_a_deviation_that_differs_by_trial_is_that_of_its_numbers():
    fused, x = fuse([Scaled(0.5), Scaled(2.0)], seeds=[0, 1]), data(2, 4)
    found = fused(x)
    for number, std in enumerate((0.5, 2.0)):
        own = fuse([Scaled(std)], seeds=[number])(x[number : number + 1])
        torch.testing.assert_close(found[number], own[0], **CLOSE)


def test_draws_that_no_call_shows_are_refused():
    fused = fuse([nn.Identity(), nn.Identity()])
    for draw in (
        lambda x: x + Beta(0.4, 0.4).sample(),
        lambda x: x + nn.init.normal_(torch.empty(4)),
        lambda x: nn.Linear(4, 1).double()(x),
    ):
        with pytest.raises(FusionError, match="draws from torch's generator within another function"):
            fused.map(draw, data(2, 4))


def test_numbers_of_a_given_generator_are_the_same_for_all_trials():
    fused, x = fuse([nn.Identity(), nn.Identity()]), data(2, 4)
    seeded = lambda: torch.Generator().manual_seed(1)  # noqa: E731
    for draw in (
        lambda x: torch.rand_like(x, generator=seeded()),
        lambda x: torch.randint_like(x, 9, generator=seeded()),
        lambda x: torch.empty_like(x).normal_(generator=seeded()),
        lambda x: torch.randn(4, generator=seeded()),
    ):
        assert torch.equal(fused.map(draw, x), torch.stack([draw(x[0])] * 2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_uniform_numbers_of_few_digits_are_less_than_one(kind):
    fused, x = fuse([nn.Identity(), nn.Identity()]), torch.zeros(2, 100_000, dtype=kind)
    for draw in (torch.rand_like, lambda x: x.clone().uniform_(), lambda x: torch.rand(x.shape, dtype=kind)):
        numbers = fused.map(draw, x).float()
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)


def test_random_numbers_have_their_distributions():
    fused, x = fuse([nn.Identity(), nn.Identity()]), torch.zeros(2, 40_000)
    chances = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0])
    moments = {
        (1.0, 2.0): lambda x: x.normal_(1.0, 2.0),
        (3.0, 2.0 / 3**0.5): lambda x: x.uniform_(1.0, 5.0),
        (2.0, 2.0): lambda x: x.exponential_(0.5),
        (2.5, 1.25**0.5): lambda x: x + torch.randint(1, 5, x.shape),
        (3.1, 0.69**0.5): lambda x: x + torch.multinomial(chances, len(x), True),
    }
    for (mean, deviation), draw in moments.items():
        drawn = fused.map(lambda x, draw=draw: draw(x.clone()), x)
        torch.testing.assert_close(drawn.mean(1), torch.full((2,), mean), atol=0.05, rtol=0)
        torch.testing.assert_close(drawn.std(1), torch.full((2,), deviation), atol=0.05, rtol=0)
    first = fused.map(lambda x: torch.multinomial(chances.expand(len(x), 6), 3), x)
    assert set(first.unique().tolist()) == {1, 3, 4}
    torch.testing.assert_close((first[..., 0] == 3).float().mean(1), torch.full((2,), 0.6), atol=0.02, rtol=0)
    orders = fused.map(lambda x: torch.randperm(len(x)), x)
    assert torch.equal(orders.sort(1).values, torch.arange(40_000).expand(2, -1))
    for wrong in (
        lambda x: x.normal_(0.0, -1.0),
        lambda x: torch.multinomial(chances, 7),
        lambda x: torch.randint(3, 3, (2,)),
        lambda x: x.long().normal_(),
    ):
        with pytest.raises((RuntimeError, FusionError), match="std|sample|integers|implemented"):
            fused.map(wrong, x)


def test_a_look_at_a_value_is_refused_with_the_line_that_looks():
    fused = fuse(make_models(Decides))
    with pytest.raises(FusionError, match=r"(?s)test_fused_module.py:\d+: if y.sum\(\) > 0:.*unfused"):
        fused(data(3, 2, 4))


@pytest.mark.parametrize("unfused", [[""], ["layer"]])
def test_what_must_not_be_fused_runs_trial_by_trial(unfused):
    make = Decides if unfused == [""] else Drops
    width = 4 if unfused == [""] else 6
    models = make_models(make)
    fused, singles = fuse(models, unfused=unfused), alone(models)
    x = data(3, 2, width)
    for _ in range(3):
        together = fused(x)
        for number, single in enumerate(singles):
            torch.testing.assert_close(together[number], single(x[number : number + 1])[0], **CLOSE)


def test_unfused_parts_keep_gradients_and_buffers_per_trial():
    models = make_models(lambda: nn.Sequential(nn.Linear(3, 3), Remembers(), nn.BatchNorm1d(3)))
    assert_equals_lone_models(models, [(data(4, 3),) for _ in models], unfused=["1", "2"])


def test_an_unknown_unfused_name_is_refused_with_the_nearest():
    with pytest.raises(FusionError, match="'layr'.*did you mean 'layer'"):
        fuse(make_models(Decides), unfused=["layr"])


def test_values_can_be_read_where_one_trial_is_alone():
    assert fuse(make_models(Decides, count=1))(data(1, 2, 4)).shape == (1, 2, 4)


def test_models_of_other_shapes_are_refused_by_name_and_can_be_grouped():
    models = [nn.Linear(3, 2), nn.Linear(4, 2), nn.Linear(3, 2)]
    with pytest.raises(FusionError, match=r"'weight' is \(\(2, 3\).*group_by_shape"):
        fuse(models)
    groups = group_by_shape([0, 1, 2], lambda number: models[number])
    assert groups == [[0, 2], [1]]


def test_a_loss_is_mapped_over_trials_with_its_own_smoothing():
    losses = fuse([nn.CrossEntropyLoss(label_smoothing=s) for s in (0.0, 0.1, 0.5)])
    logits, target = data(3, 5, 4), torch.randint(0, 4, (3, 5))
    expected = [
        F.cross_entropy(logits[k], target[k], label_smoothing=s) for k, s in enumerate((0.0, 0.1, 0.5))
    ]
    torch.testing.assert_close(losses(logits, target), torch.stack(expected), **CLOSE)


class Numbers(nn.Module):
    """Floats of every kind that may differ between trials."""

    def __init__(self, number):
        super().__init__()
        self.scale = 0.5 + number
        self.norm = nn.BatchNorm1d(3, eps=10.0**-number, momentum=0.1 * (number + 1))
        self.leaky = nn.LeakyReLU(0.1 * (number + 1))
        self.layer = nn.LayerNorm(3, eps=10.0**-number)

    def forward(self, x):
        return self.leaky(self.norm(x)) * self.scale + (1 - self.scale) + self.layer(x)


def test_floats_that_differ_between_models_are_each_trials_own():
    torch.manual_seed(0)
    models = [Numbers(number).double() for number in range(3)]
    assert_equals_lone_models(models, [(data(4, 3),) for _ in models])


def test_a_branch_on_a_number_that_differs_is_refused_unless_all_agree():
    per_trial = PerTrial((0.0, 0.5))
    with pytest.raises(FusionError, match="results differ"):
        bool(per_trial)
    with pytest.raises(FusionError, match="makes one number"):
        float(per_trial)
    assert per_trial < 1
    assert (1 - per_trial).values == (1.0, 0.5)
    assert (-per_trial).values == (0.0, -0.5)


def test_random_operations_and_shapes_changed_in_place_are_refused():
    fused = fuse(make_models(lambda: nn.Linear(4, 4)))
    with pytest.raises(FusionError, match="rrelu"):
        fused.map(lambda x: F.rrelu(x, training=True), data(3, 4))
    with pytest.raises(FusionError, match="geometric_"):
        fused.map(lambda x: x.geometric_(0.5), data(3, 4))
    with pytest.raises(FusionError, match="use unsqueeze"):
        fused.map(lambda x: x.unsqueeze_(0), data(3, 4))


def test_nan_in_one_trial_leaves_its_neighbours_alone():
    def make():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))

    models = make_models(make)
    broken, whole = fuse(models), fuse(models)
    x = data(3, 5, 1, 4, 4)
    whole(x).square().sum().backward()
    x = x.clone()
    x[1, 0] = float("nan")
    broken(x).square().sum().backward()
    for found, wanted in zip(broken.parameters(), whole.parameters()):
        assert found.grad[1].isnan().any()
        torch.testing.assert_close(found.grad[[0, 2]], wanted.grad[[0, 2]], **CLOSE)


OUTSIDE = torch.zeros(4, dtype=torch.float64)
SHARED_INPUT = torch.zeros(4, dtype=torch.float64)


def seen(look):
    def write(x):
        made = torch.zeros(4, dtype=x.dtype)
        held = look(made)
        made.copy_(x)
        return held

    return write


def detached_first(x):
    made = torch.zeros(2, 4, dtype=x.dtype)
    made.detach()[0] = x
    return made


def through_data(x):
    made = torch.zeros(4, dtype=x.dtype)
    made.data.copy_(x)
    return made


def referred_to(x):
    made = torch.zeros(4, dtype=x.dtype)
    reference = weakref.ref(made)
    made.copy_(x)
    return reference()


UNCLEAR = {
    "with a weak reference": referred_to,
    "set": lambda x: setattr(OUTSIDE, "data", x),
    "made outside": lambda x: OUTSIDE.add_(x),
    "made outside, by an operator": lambda x: operator.iadd(OUTSIDE, x),
    "a part of what was made outside": lambda x: OUTSIDE[:2].copy_(x[:2]),
    "numbers of outside": lambda x: torch.from_numpy(OUTSIDE.numpy()).copy_(x),
    "filled outside": lambda x: OUTSIDE.normal_() + x,
    "given": lambda x: SHARED_INPUT.to(x.dtype).copy_(x),
    "a leaf": lambda x: torch.zeros(4, dtype=x.dtype, requires_grad=True).copy_(x),
    "with a view": seen(lambda made: made[:2]),
    "with a detached view": seen(lambda made: made.detach()),
    "with its data": seen(lambda made: made.data),
    "with an array": seen(lambda made: made.numpy()),
    "through what is detached": detached_first,
    "through its data": through_data,
    "the real part": lambda x: torch.zeros(4, dtype=torch.complex128).real.copy_(x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", UNCLEAR.values(), ids=UNCLEAR)
def test_a_shared_tensor_that_may_be_anothers_cannot_be_written_by_trials(write, inference):
    if inference and write in (through_data, detached_first):  # where a detached tensor is but a view
        return
    fused = fuse(make_models(lambda: nn.Linear(4, 4)))
    with torch.inference_mode(inference), pytest.raises(FusionError, match="zeros_like|trials share"):
        fused.map(write, data(3, 4))
    assert type(OUTSIDE) is type(SHARED_INPUT) is torch.Tensor
    assert not OUTSIDE.any()


class HasBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))


def returned_by_another_name(model, x):
    first, same = model.kept[:1], model.kept.to(model.kept.dtype)
    same.copy_(x)
    return {"whole": [same], "first": first}


def with_an_attribute(model, x):
    made = torch.zeros(4)
    made.scale = 3.0
    made.copy_(x)
    return made * made.scale


@pytest.mark.parametrize("run", [returned_by_another_name, with_an_attribute])
def test_what_is_written_leaves_a_forward_as_each_trials(run):
    models, x = [HasBuffer() for _ in range(2)], torch.randn(2, 4)
    found = fuse(models).call(run, x)
    for number, model in enumerate(models):
        for mine, lone in zip(pytree.tree_leaves(found), pytree.tree_leaves(run(model, x[number]))):
            torch.testing.assert_close(mine[number], lone)


class Decoder(nn.Module):
    """Collects what it computes in tensors that it makes, and holds in several places."""

    def __init__(self, write):
        super().__init__()
        self.cell, self.write = nn.GRUCell(4, 5), write

    def forward(self, x):
        batch, steps, _ = x.shape
        state, collected = torch.zeros(batch, 5), torch.zeros(batch, steps, 5).to(x.dtype)
        held = {"one": [collected], "two": collected}
        for step in range(steps):
            state = self.cell(x[:, step], state.to(x.dtype))
            self.write(collected, step, state)
        large, counts, reached = torch.zeros(batch, 5).bool(), torch.ones(5, batch).int().t(), torch.zeros(())
        large[state > 0] = True
        other = large
        large |= state < -0.5
        counts += 1
        counts.copy_(counts + other)
        reached += state.sum()
        number = torch.tensor(0)
        number += (state == state).sum()
        reached = reached + torch.arange(number).sum()  # which torch reads in C++
        self.kept = counts
        return collected, state * large / counts + held["one"][0].sum(1) + held["two"][:, 0] * reached


def write_masked(collected, step, state):
    collected.masked_fill_((state > 0)[:, None], 0.5)
    collected[:, step] += state


WRITES = {
    "an item": lambda collected, step, state: collected.__setitem__((slice(None), step), state),
    "a view": lambda collected, step, state: collected[:, step].copy_(state),
    "by a function": lambda collected, step, state: collected.index_copy_(
        1, torch.tensor([step]), state[:, None]
    ),
    "a sum": lambda collected, step, state: collected.add_(state[:, None]),
    "masked": write_masked,
}


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_tensor_that_a_forward_made_becomes_each_trials_where_they_write_to_it(write, recompute):
    def run(model, x):
        if recompute is None:
            return model(x)
        return checkpoint(model, x, use_reentrant=recompute)

    models, x = make_models(lambda: Decoder(write)), data(3, 2, 6, 4).requires_grad_()
    fused = fuse(copy.deepcopy(models))
    assert not fused.unfused
    found = fused.call(run, x)
    (gradient,) = torch.autograd.grad(sum(part.square().sum() for part in found), x, retain_graph=True)
    sum(part.square().sum() for part in found).backward()
    for number, model in enumerate(models):
        own = x[number].detach().requires_grad_()
        wanted = model(own)
        sum(part.square().sum() for part in wanted).backward()
        for mine, lone in zip(found, wanted):
            torch.testing.assert_close(mine[number], lone, **CLOSE)
        torch.testing.assert_close(gradient[number], own.grad, **CLOSE)
        for fused_one, lone in zip(fused.parameters(), model.parameters()):
            torch.testing.assert_close(fused_one.grad[number], lone.grad, **CLOSE)
        assert torch.equal(copy.deepcopy(fused).trial(number).kept, model.kept)
    with torch.inference_mode():
        found = fused(x)
        for number, model in enumerate(models):
            for mine, lone in zip(found, model(x[number])):
                torch.testing.assert_close(mine[number], lone, **CLOSE)
        with pytest.raises(FusionError, match="after its call has ended"):
            fused.module.kept.sum()


def test_the_fused_module_moves_and_saves_like_any_other():
    models = make_models(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    fused = fuse(models)
    other = fuse(make_models(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), seed=1))
    other.load_state_dict(fused.state_dict())
    x = data(3, 4, 3)
    torch.testing.assert_close(other(x), fused(x), **CLOSE)
    assert fused.float()(x.float()).dtype == torch.float32


def test_a_fused_module_refuses_to_be_compiled_and_says_what_helps_instead():
    fused, x = fuse(make_models(lambda: nn.Linear(3, 2))), data(3, 4, 3)
    wanted = fused(x)
    compiled = partial(torch.compile, backend="eager")
    for attempt in (
        fused.compile,
        partial(compiled(fused), x),
        partial(compiled(lambda x: fused(x.sin())), x),
        partial(compiled(lambda x: fused.map(torch.sum, x)), x),
    ):
        with pytest.raises(FusionError, match="capture the step as a CUDA graph"):
            attempt()
    as_it_is = torch.compiler.disable(fused)
    assert torch.equal(compiled(lambda x: as_it_is(x) + 0.0)(x), wanted)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (nn.Linear(2, 3), "found a Linear, expected a list of models of the same shape"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "found a Sequential, expected a list"),
        (4, "found a int, expected a list"),
        ([], "found no models"),
        ([3], "found 3 as model 0, expected a torch.nn.Module"),
        ([nn.Linear], "as model 0, expected a torch.nn.Module"),
    ],
)
def test_what_is_no_list_of_models_is_answered_with_what_is(models, words: str):
    with pytest.raises(FusionError, match=words):
        fuse(models)


def test_a_module_list_is_a_list_of_models():
    assert fuse(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])).trials == 2


def test_shared_takes_tensors_and_only_a_fused_module_takes_shared():
    x = torch.randn(4, 2)
    with pytest.raises(
        FusionError, match="Shared: found a dict, expected a tensor; wrap each tensor separately"
    ):
        Shared({"x": x})
    with pytest.raises(FusionError, match=r"cross_entropy: found a Shared.*fused.map\(cross_entropy, output"):
        F.cross_entropy(x, Shared(torch.zeros(4, dtype=torch.int64)))


LOSSES = {
    "plain": F.cross_entropy,
    "smooth": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "weighted": lambda y, t: F.cross_entropy(y, t, weight=torch.ones(3)),
    "log": lambda y, t: F.nll_loss(F.log_softmax(y, 1), t),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.zeros(5, dtype=torch.int64), r"class indices of shape \(5,\) in each trial"),
        (torch.zeros(9, dtype=torch.int64), r"expected integer class indices of shape \(8,\)"),
        (torch.zeros(8, 1, dtype=torch.int64), r"class indices of shape \(8, 1\)"),
        (torch.zeros(8), r"probabilities of shape \(8,\) in each trial"),
    ],
)
def test_targets_that_fit_no_outputs_are_named_with_both_shapes(targets, words: str, loss: str):
    fused = fuse([nn.Linear(2, 3) for _ in range(2)])
    outputs = fused(Shared(torch.randn(8, 2)))
    with pytest.raises(FusionError, match=words):
        fused.map(LOSSES[loss], outputs, Shared(targets))


def test_chances_and_class_numbers_of_fitting_shapes_are_targets():
    fused = fuse([nn.Linear(2, 3) for _ in range(2)])
    outputs = fused(Shared(torch.randn(8, 2)))
    for targets in (torch.zeros(8, dtype=torch.int64), torch.full((8, 3), 1 / 3)):
        losses = fused.map(F.cross_entropy, outputs, Shared(targets))
        expected = [F.cross_entropy(output, targets) for output in outputs]
        torch.testing.assert_close(losses, torch.stack(expected))


class MaskedBefore(nn.Module):
    """Fills a mask outside of what activation checkpointing computes again; keeps it."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), reentrant

    def forward(self, x):
        self.kept = torch.empty(6, 1)
        self.kept.bernoulli_(0.5)
        hidden = self.first(x)

        def rest(h):
            return (self.second(h) * self.kept.view(1, -1)).tanh()

        if self.reentrant is None:
            return rest(hidden)
        return checkpoint(rest, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_mask_that_is_filled_before_a_checkpoint_is_that_of_the_forward_and_stays_each_trials(reentrant):
    torch.manual_seed(0)
    made, x = [MaskedBefore(None) for _ in range(2)], torch.randn(2, 4, 6)
    gradients = []
    for reentrant_or_none in (None, reentrant):
        for model in made:
            model.reentrant = reentrant_or_none
        fused = fuse(copy.deepcopy(made), seeds=[1, 2])
        fused(x).square().sum().backward()
        assert fused.unfused == {}
        gradients.append([p.grad.clone() for p in fused.module.parameters()])
        kept = [fused.trial(number).kept for number in range(2)]
        assert not torch.equal(*kept)
        assert all(set(one.unique().tolist()) <= {0.0, 1.0} for one in kept)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_the_weights_of_recurrent_layers_are_left_as_they_are():
    """cuDNN's layout is for those of one model; torch makes it when a module is moved."""
    fused = fuse([nn.GRU(3, 4) for _ in range(2)])
    assert isinstance(vars(fused.module)["flatten_parameters"], Patch)
    fused.module.flatten_parameters()
    assert "flatten_parameters" not in vars(fused.trial(0))
    assert copy.deepcopy(fused)(torch.randn(2, 5, 1, 3))[0].shape == (2, 5, 1, 4)


def test_what_is_detached_in_place_has_no_gradients_rather_than_zeros():
    class Detaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)

        def forward(self, x):
            y = self.one(x)
            y.detach_()
            return self.two(y)

    fused = fuse([Detaching() for _ in range(2)])
    fused(torch.randn(2, 3, 4, 7)).sum().backward()
    assert fused.module.one.weight.grad is None
    assert fused.module.two.weight.grad is not None
