"""Modules that run trial by trial are real: Python state, draws, buffers and gradients of their own."""

from __future__ import annotations

import copy
import functools
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse, make_models
from torch import nn

from plait.fusion import FusedOptimizer, FusionError, Shared, group_by_shape, keep_trials, replace_trial

LR = 0.05


def batches(count=6, trials=3, rows=4, width=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, trials, rows, width, generator=generator, dtype=torch.float64)


def assert_trains_as_alone(make, unfused=(), inputs=None, kind="sgd", models=None):
    """Several steps of the fused trials equal those of each model with torch's optimizer."""
    models = models or make_models(make)
    inputs = batches(trials=len(models)) if inputs is None else inputs
    fused = fuse(models, unfused=unfused).train()
    optimizer = FusedOptimizer(fused, kind, lr=LR)
    losses = []
    for x in inputs:
        optimizer.zero_grad()
        each = fused(x).square().flatten(1).sum(1)
        each.sum().backward()
        optimizer.step()
        losses.append(each.detach())
    for number, model in enumerate(models):
        model = copy.deepcopy(model).train()
        lone = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](model.parameters(), lr=LR)
        for step, x in enumerate(inputs):
            lone.zero_grad()
            loss = model(x[number]).square().sum()
            loss.backward()
            lone.step()
            assert losses[step][number].item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
        one = fused.trial(number)
        for key, value in model.state_dict().items():
            assert torch.allclose(one.state_dict()[key], value, rtol=1e-9, atol=1e-9), (number, key)
    return fused


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)


class RunningAverage(Base):
    def __init__(self):
        super().__init__()
        self.average = 1.0

    def forward(self, x):
        h = self.layer(x)
        self.average = 0.9 * self.average + 0.1 * h.abs().mean().item()
        return h / self.average


class Counter(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.layer(x) * min(1.0, self.calls / 4)
        return h if h.mean() > 0 else h.tanh()


class Gate(nn.Module):
    def forward(self, h):
        return h.abs().mean().item()


class Gated(Base):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        h = self.layer(x)
        return h * self.gate(h)


class BufferInBranch(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        h = self.layer(x)
        if h.mean().item() > 0.0:
            self.scale = self.scale * 0.9 + 0.1 * h.detach().abs().mean(0)
        return h * self.scale


class Sets(Base):
    def forward(self, x):
        self.layer.weight.data = self.layer.weight.data.sign() * 0.1
        return self.layer(x) if x.mean() > 0 else self.layer(x).tanh()


class Leaves(Base):
    """Leaves what it computed in containers."""

    def __init__(self):
        super().__init__()
        self.maps, self.losses = [], {}

    def forward(self, x):
        h = self.layer(x)
        self.maps = [h.tanh()]
        self.losses["size"] = h.square().mean()
        return h + self.losses["size"]


class WritesInput(Base):
    def forward(self, x):
        x.mul_(2.0)
        return self.layer(x)


@pytest.mark.parametrize(
    ("make", "unfused"),
    [
        (RunningAverage, [""]),
        (Counter, [""]),
        (Gated, ["gate"]),
        (BufferInBranch, [""]),
        (Sets, [""]),
        (Leaves, ["layer"]),
        (Leaves, [""]),
    ],
)
def test_a_module_trial_by_trial_trains_as_it_does_alone(make, unfused):
    assert_trains_as_alone(make, unfused)


class Drawn(nn.Module):
    def forward(self, h):
        return h * (torch.rand(h.shape, dtype=h.dtype) > 0.3) + 0.1 * torch.randn_like(h)


class Noise(Base):
    def __init__(self):
        super().__init__()
        self.noise = Drawn()

    def forward(self, x):
        return self.noise(self.layer(x))


class OtherNoise(Base):
    """Draws that no stream knows: torch's generator in place, permutations, and Python's own."""

    def forward(self, x):
        h = self.layer(x) * torch.empty(x.shape, dtype=x.dtype).uniform_(0.5, 1.5)
        return h[:, torch.randperm(6)] * random.random()


def test_draws_of_a_module_trial_by_trial_are_those_it_has_when_fused():
    models = make_models(Noise)
    x = batches(1)[0]
    torch.testing.assert_close(fuse(models, unfused=["noise"])(x), fuse(models)(x), rtol=0, atol=0)


def test_draws_that_no_stream_knows_depend_on_the_trial_alone():
    models = make_models(OtherNoise)
    fused = fuse(models, unfused=[""])
    singles = [fuse([model], seeds=[number], unfused=[""]) for number, model in enumerate(models)]
    before = torch.get_rng_state(), random.getstate()
    for x in batches(3):
        together = fused(x)
        for number, single in enumerate(singles):
            torch.testing.assert_close(single(x[number][None])[0], together[number], rtol=0, atol=0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        return self.first(x) if x.mean() > 0 else self.second(x)


def test_a_branch_that_a_trial_does_not_take_gives_its_parameters_no_gradient():
    models = make_models(Chooses)
    fused = fuse(models, unfused=[""])
    optimizer = FusedOptimizer(fused, "adamw", lr=LR, weight_decay=0.1)
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64).view(3, 1, 1)
    fused(batches(1)[0].abs() * signs).square().sum().backward()
    before = [copy.deepcopy(model.state_dict()) for model in fused.split()]
    optimizer.step()
    for number, (model, state) in enumerate(zip(fused.split(), before)):
        moved = {key for key, value in model.state_dict().items() if not torch.equal(value, state[key])}
        part = "second" if number == 1 else "first"
        assert moved == {f"{part}.weight", f"{part}.bias"}


def test_a_module_that_writes_into_a_shared_input_does_so_for_each_trial():
    models = make_models(WritesInput)
    fused = fuse(models, unfused=[""])
    for x in batches(3)[:, 0]:
        together = fused(Shared(x.clone()))
        for number, model in enumerate(models):
            torch.testing.assert_close(together[number], model(x.clone()), rtol=1e-12, atol=1e-12)


def test_a_weight_tied_to_a_fused_module_trains_as_it_does_alone():
    def make():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        return model

    assert_trains_as_alone(make, ["2"], kind="adam")


def test_trials_leave_and_enter_with_their_own_python_state():
    models = make_models(RunningAverage, 4)
    fused = fuse(models[:3], unfused=[""])
    optimizer = FusedOptimizer(fused, "sgd", lr=LR)
    xs = batches(3)
    fused(xs[0])
    averages = [trial.average for trial in fused.split()]
    keep_trials(fused, optimizer, [2, 0])
    assert [trial.average for trial in fused.split()] == [averages[2], averages[0]]
    replace_trial(fused, optimizer, 1, models[3], seed=9)
    together = fused(xs[1][:2])
    assert torch.allclose(together[1], models[3](xs[1][1]), rtol=0, atol=1e-12)


class Counts(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_a_newcomer_begins_with_its_own_counter_next_to_trials_that_have_moved_on():
    models = make_models(Counts, 4)
    fused = fuse(models[:3])
    optimizer = FusedOptimizer(fused, "sgd", lr=LR)
    x = batches(1)[0]
    fused(x)
    replace_trial(fused, optimizer, 1, models[3], seed=9)
    assert list(fused.unfused) == [""]
    assert "calls" in fused.unfused[""]
    together = fused(x)
    assert torch.allclose(together[1], models[3](x[1]), rtol=0, atol=1e-12)
    models[0](x[0])
    assert torch.allclose(together[0], models[0](x[0]), rtol=0, atol=1e-12)


class Applies(Base):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    "values",
    [
        (F.relu, torch.tanh),
        ({"scale": 1}, {"scale": 2}),
        ([1.0], [2.0]),
        (SimpleNamespace(scale=1.0), SimpleNamespace(scale=2.0)),
        (
            functools.partial(F.leaky_relu, negative_slope=0.1),
            functools.partial(F.leaky_relu, negative_slope=0.2),
        ),
        (None, 0.1),
        ([torch.tensor(1.0)], [torch.tensor(2.0)]),
        ((lambda k: lambda x: x * k)(1.0), (lambda k: lambda x: x * k)(2.0)),
        ((1, 1), (2, 2)),
    ],
    ids=["function", "dict", "list", "object", "partial", "none", "tensors", "closure", "tuple"],
)
def test_models_that_differ_in_an_attribute_are_refused_and_sorted_apart(values):
    models = [Applies(value) for value in (values[0], values[0], values[1])]
    with pytest.raises(FusionError, match=r"the model\.value is .* in model 0 and .* in model 2"):
        fuse(models)
    assert [len(group) for group in group_by_shape(models, lambda model: model)] == [2, 1]


def test_equal_attributes_of_many_kinds_do_not_keep_models_apart():
    def make():
        model = Applies({"act": F.gelu, "sizes": (1, 2), "own": SimpleNamespace(a=[torch.ones(2)])})
        model.layer.register_forward_hook(lambda m, i, o: o * 2)
        return model

    models = [make().double(), make().double()]
    x = batches(count=1, trials=2)[0]
    expected = torch.stack([model(own) for model, own in zip(models, x)])
    torch.testing.assert_close(fuse(models)(x), expected, rtol=1e-12, atol=1e-12)
    assert [len(group) for group in group_by_shape(models, lambda model: model)] == [2]


def test_a_float_in_a_dict_is_a_hyperparameter_of_trials_that_come_and_go():
    class Scales(Applies):
        def forward(self, x):
            return self.layer(x) * self.value["scale"]

    models = [Scales({"scale": scale}).double() for scale in (1.0, 2.5, 2.0)]
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    x = batches(count=1, trials=2)[0]
    replace_trial(fused, optimizer, 0, models[2], 0)
    torch.testing.assert_close(fused(x), torch.stack([models[2](x[0]), models[1](x[1])]))
    keep_trials(fused, optimizer, [1, 0])
    assert [model.value["scale"] for model in fused.split()] == [2.5, 2.0]


def test_an_int_in_the_place_of_a_float_is_a_hyperparameter():
    fused = fuse([Applies(1), Applies(2.5)])
    assert [model.value for model in fused.split()] == [1.0, 2.5]


def test_a_layer_without_a_shape_is_refused_in_one_sentence():
    with pytest.raises(FusionError, match="'0.weight' of model 0 has no shape yet"):
        fuse([nn.Sequential(nn.LazyLinear(3)) for _ in range(2)])


class Cache:
    def __init__(self):
        self.kept = []


class Remembers(nn.Module):
    def forward(self, h, cache):
        cache.kept.append(h)
        return h * len(cache.kept)


class PassesCache(Base):
    def __init__(self):
        super().__init__()
        self.inner = Remembers()

    def forward(self, x):
        return self.inner(self.layer(x), Cache())


def test_a_module_that_changes_what_all_trials_share_is_refused_and_verification_goes_around_it():
    models = make_models(PassesCache)
    with pytest.raises(FusionError, match="Remembers changes an argument object"):
        fuse(models, unfused=["inner"])(batches(1)[0])
    assert list(fuse(models, unfused=["inner"], verify=list(batches(2)[:, 0])).unfused) == [""]


def test_a_frozen_weight_stays_and_learns_once_it_is_not():
    models = make_models(lambda: nn.Linear(6, 6))
    for model in models:
        model.weight.requires_grad_(False)
    fused = fuse(models, unfused=[""])
    x = batches(1)[0]
    fused(x).square().sum().backward()
    assert fused.module.weight.grad is None
    assert fused.module.bias.grad is not None
    fused.module.weight.requires_grad_(True)
    fused(x).square().sum().backward()
    assert fused.module.weight.grad.abs().flatten(1).sum(1).min() > 0


def test_code_of_one_trial_passes_one_function_mode():
    class Counting(nn.Linear):
        def forward(self, x):
            modes.append(torch._C._len_torch_function_stack())
            return super().forward(x)

    modes: list[int] = []
    fused = fuse([Counting(2, 2) for _ in range(3)], unfused=[""], verify=False)
    fused(torch.randn(3, 4, 2))
    assert modes == [1, 1, 1]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_all_trials_is_refused_where_trials_run_one_by_one(register):
    models = make_models(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    models[0][0].weight.register_hook(
        lambda gradient: gradient * 2
    )  # registered before, it is that of its trial
    fused = fuse(models, unfused=["0"])
    fused.module[1].weight.register_hook(lambda gradient: gradient * 2)
    fused(batches(1)[0]).sum().backward()
    getattr(fused.module[0].weight, register)(print)
    with pytest.raises(
        FusionError, match=r"gradient of 'weight' would not be called, since Linear runs trial by"
    ):
        fused(batches(1)[0])


class Teacher(Base):
    """Follows its layer by a moving average of a frozen copy, which all trials share at first."""

    def __init__(self, follows):
        super().__init__()
        self.average = nn.Linear(6, 6, bias=False).requires_grad_(False)
        nn.init.eye_(self.average.weight)
        self.follows, self.calls = follows, 0

    def forward(self, x):
        self.calls += 1
        if self.follows(self, x):
            with torch.no_grad():
                self.average.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
        return self.layer(x) - self.average(x)


def test_a_shared_tensor_to_which_later_trials_write_first_becomes_each_trials():
    inputs = batches().abs()
    inputs[:, 0] *= -1
    models = make_models(lambda: Teacher(lambda own, x: x.mean() > 0))
    before = models[0].average.weight.clone()
    fused = assert_trains_as_alone(None, [""], inputs, models=models)
    assert not fused.shared
    assert torch.equal(models[0].average.weight, before)


class LateTeacher(Base):
    def __init__(self, write):
        super().__init__()
        self.average = nn.Linear(6, 6, bias=False).requires_grad_(False)
        nn.init.eye_(self.average.weight)
        self.register_buffer("seen", torch.ones(6))
        self.write, self.calls = write, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.write(self)
        return self.layer(x) - self.average(x) * self.seen


@pytest.mark.parametrize(
    "write",
    [
        lambda own: own.average.weight.data.mul_(0.9).add_(own.layer.weight.data, alpha=0.1),
        lambda own: own.seen.numpy().__imul__(0.5),
    ],
    ids=["data", "numpy"],
)
def test_a_late_write_past_the_version_counters_of_what_trials_share_is_refused(write):
    fused, x = fuse(make_models(lambda: LateTeacher(write)), unfused=[""]), batches()
    fused(x[0])
    fused(x[1])
    with pytest.raises(FusionError, match="which all trials share"):
        fused(x[2])
    fused.shared["average.weight"].data.mul_(0.5)  # between two forwards it is the user's own matter
    other = fuse(make_models(lambda: LateTeacher(write)), unfused=[""])
    for number in range(2):
        other(x[number])
        other.shared["average.weight"].data.mul_(0.5)


class Thaws(Base):
    def __init__(self, thaws):
        super().__init__()
        self.other = nn.Linear(6, 6).requires_grad_(not thaws)
        self.thaws, self.calls = thaws, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.other.requires_grad_(self.thaws)
        return self.other(self.layer(x))


@pytest.mark.parametrize("thaws", [False, True])
def test_a_module_freezes_and_unfreezes_its_own_layers(thaws):
    fused = fuse(make_models(lambda: Thaws(thaws)), unfused=[""], share="never")
    singles = make_models(lambda: Thaws(thaws))
    optimizer = FusedOptimizer(fused, "sgd", lr=LR)
    optimizers = [torch.optim.SGD(single.parameters(), lr=LR) for single in singles]
    for x in batches():
        optimizer.zero_grad()
        fused(x).square().sum().backward()
        optimizer.step()
        for single, own, each in zip(singles, optimizers, x):
            own.zero_grad()
            single(each).square().sum().backward()
            own.step()
    for number, single in enumerate(singles):
        torch.testing.assert_close(
            fused.trial(number).state_dict(), single.state_dict(), rtol=1e-9, atol=1e-9
        )


class Adjusted(Base):
    def __init__(self):
        super().__init__()
        self.drop, self.scale = nn.Dropout(0.5), 1.0

    def set_scale(self, scale):
        self.scale = scale

    def forward(self, x):
        return self.drop(self.layer(x)) * self.scale


def test_what_is_set_on_a_part_after_fusing_holds_for_all_trials():
    models, x = make_models(Adjusted), batches()[0]
    fused = fuse(models, unfused=[""])
    fused(x)
    for changed in (fused.module, *models):
        changed.set_scale(0.1)
        changed.drop.p = 0.0
    fused = copy.deepcopy(fused)
    together = fused(x)
    for number, model in enumerate(models):
        torch.testing.assert_close(together[number], model(x[number]), rtol=1e-12, atol=1e-12)
        assert fused.trial(number).scale == 0.1
    fused.module.layer.register_state_dict_pre_hook(lambda *given: None)
    fused(x)  # states are those of the fused module
    fused.module.layer.register_forward_hook(lambda *given: None)
    with pytest.raises(FusionError, match="a hook on 'layer' would not be called"):
        fused(x)


def test_gradients_reach_parameters_that_were_assigned_from_a_state():
    fused = fuse(make_models(Base), unfused=["layer"])
    run = lambda: fused.call(lambda model, x: model.layer(x), batches()[0]).square().sum().backward()  # noqa: E731
    run()
    wanted = [parameter.grad.clone() for parameter in fused.parameters()]
    fused.load_state_dict(copy.deepcopy(fused.state_dict()), assign=True)
    run()
    for parameter, gradient in zip(fused.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, gradient)


class SkipsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x) if x.mean() > 0 else x * 2


class UsesOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.last = SkipsInside(), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.part(F.linear(x, self.part.layer.weight)))


def test_a_weight_that_a_part_skips_moves_by_what_the_model_uses_it_for():
    assert_trains_as_alone(UsesOutside, ["part"], kind="adam")


class Marks(Base):
    always = False

    def forward(self, x, mask):
        if self.training or self.always:
            mask.mul_(x.mean().sign() if self.unlike else 0.5)
        return self.layer(x) * mask.clone()


class Masked(nn.Module):
    def __init__(self, unlike):
        super().__init__()
        self.part = Marks()
        self.part.unlike = unlike

    def forward(self, x):
        mask = torch.ones(6, dtype=x.dtype)
        return self.part(x, mask) + mask


def test_writes_to_an_argument_are_looked_at_in_each_mode_and_refused_where_they_differ():
    models, x = make_models(lambda: Masked(False)), batches()[0]
    fused = fuse(models, unfused=["part"])
    for training in (False, True, True):
        together = fused.train(training)(x)
        for number, model in enumerate(models):
            wanted = model.train(training)(x[number])
            torch.testing.assert_close(together[number], wanted, rtol=1e-12, atol=1e-12)
    fused = fuse(make_models(lambda: Masked(True)), unfused=["part"])
    x[0], x[1] = x[0].abs(), -x[1].abs()
    with pytest.raises(FusionError, match="writes what differs between trials into an argument"):
        fused(x)
    one, wanted = fuse([copy.deepcopy(models[0])], unfused=["part"]).eval(), copy.deepcopy(models[0]).eval()
    for always in (False, True):  # a trial alone may write when it likes
        for part in (*one.per_trial_modules["part"].modules, wanted.part):
            part.always = always
        torch.testing.assert_close(one(x[:1])[0], wanted(x[0]), rtol=1e-12, atol=1e-12)
    late = fuse(make_models(lambda: Masked(False)), unfused=["part"])
    late.module.part.training = False
    late(x)
    for part in late.per_trial_modules["part"].modules:
        part.always = True
    with pytest.raises(FusionError, match="and did not in the first forward"):
        late(x)


class Chance(Base):
    def forward(self, x):
        DRAWN.append(random.random())
        return x + self.layer(x)


DRAWN = []


def test_parts_of_one_forward_draw_unlike_numbers_from_pythons_generator():
    make = lambda: nn.Sequential(*[Chance() for _ in range(4)])  # noqa: E731
    fused = fuse(make_models(make), unfused=list("0123"))
    DRAWN.clear()
    fused(batches()[0])
    assert len(set(DRAWN)) == len(DRAWN) == 12


class CountsCalls(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_a_buffer_that_is_first_written_under_inference_mode_can_be_written_after_it():
    fused = fuse(make_models(CountsCalls), unfused=[""])
    with torch.inference_mode():
        fused(batches()[0])
    fused(batches()[0]).sum().backward()
    assert fused.trial(1).calls == 2


class HasExtraState(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += 1 + int(x.mean() > 0)
        return self.layer(x) * self.calls


def test_the_extra_state_of_a_module_is_that_of_each_trial():
    fused, x = fuse(make_models(HasExtraState), unfused=[""]), batches()[0]
    x[0], x[1] = x[0].abs(), -x[1].abs()
    fused(x)
    state = copy.deepcopy(fused.state_dict())
    assert [fused.trial(number).calls for number in (0, 1)] == [2, 1]
    fused(x)
    other = copy.deepcopy(fused)
    for each in (fused, other):
        each.load_state_dict(state)
        assert [each.trial(number).calls for number in (0, 1)] == [2, 1]
    assert fused.trial(0).state_dict()["_extra_state"] == {"calls": 2}


class CountsPositive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts):
        counts += (x > 0).sum(0)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_what_takes_tensors_of_all_trials_or_writes_to_what_they_share_is_named():
    fused, x = fuse(make_models(Base)), batches()[0]
    with pytest.raises(
        FusionError, match="calls CountsPositive, which writes to an argument that all trials"
    ):
        fused.map(lambda x: CountsPositive.apply(x, torch.zeros(6, dtype=torch.int64)), x)
    takes = fuse(make_models(Takes), unfused=["part"])
    with pytest.raises(
        FusionError, match="Calls takes an object or a function that holds tensors of all trials"
    ):
        takes(x)


class Calls(nn.Module):
    def forward(self, x, function):
        return function(x)


class Takes(Base):
    def __init__(self):
        super().__init__()
        self.part = Calls()

    def forward(self, x):
        return self.part(x, lambda h: h + self.layer(x))
