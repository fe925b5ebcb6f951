"""What a model does past tensors is each trial's own: autograd functions, checkpoints, hooks, numbers."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from fused_checks import fuse, make_models
from test_unfused_modules import Base, assert_trains_as_alone, batches
from torch import nn

from plait.fusion import FusedOptimizer, FusionError, Shared
from support.odd_models import Sign


class Product(torch.autograd.Function):
    """Of a tensor and a weight, both of which it saves."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight, x.mean()

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


sign = Sign.apply


class StraightThrough(Base):
    def forward(self, x):
        return self.layer(Sign.apply(self.layer(x)))


class UnderAnotherName(Base):
    def forward(self, x):
        return self.layer(sign(self.layer(x)))


class SavesForBackward(Base):
    def forward(self, x):
        product, mean = Product.apply(self.layer(x), self.layer.bias)
        return product + mean


class Checkpointed(Base):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.0)

    def inner(self, h):
        return self.drop(self.norm(self.layer(h)).tanh())

    def forward(self, x):
        h = self.layer(x)
        return self.layer(checkpoints.checkpoint(self.inner, h, use_reentrant=self.reentrant))


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class RegistersBuffer(Base):
    def forward(self, x):
        h = self.layer(x)
        if not hasattr(self, "scale"):
            self.register_buffer("scale", h.detach().abs().mean())
        return h / self.scale


class HookInForward(Base):
    def forward(self, x):
        h = self.layer(x)
        h.register_hook(lambda g: g / (g.norm() + 1e-6))
        return self.layer(h)


class BackwardHook(Base):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 6)
        self.last.register_full_backward_hook(lambda module, i, o: tuple(g * 0.5 for g in i))

    def forward(self, x):
        return self.last(self.layer(x))


class SetsData(Base):
    def forward(self, x):
        self.layer.weight.data = self.layer.weight.data.sign() * 0.1
        return self.layer(x)


class GradientOfInput(Base):
    def forward(self, x):
        z = x.detach()
        z.requires_grad = True
        (slope,) = torch.autograd.grad(self.layer(z).square().sum(), z, create_graph=True)
        return self.layer(x) + 0.01 * slope


@pytest.mark.parametrize(
    "make",
    [
        StraightThrough, UnderAnotherName, SavesForBackward, Checkpointed, CheckpointedReentrant,
        RegistersBuffer, HookInForward, BackwardHook, SetsData, GradientOfInput,
    ],
)  # fmt: skip
def test_what_goes_past_tensors_trains_as_it_does_alone(make):
    assert_trains_as_alone(make)


def test_spectral_norm_runs_trial_by_trial_and_trains_as_it_does_alone():
    for norm in (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm):
        models = make_models(
            lambda norm=norm: nn.Sequential(norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2))
        )
        unfused = fuse(models, verify=list(batches(2)[:, 0])).unfused
        assert unfused
        assert "" not in unfused
        assert_trains_as_alone(None, unfused, models=models)


def test_torchs_own_functions_are_back_after_a_forward():
    before = checkpoints.CheckpointFunction, checkpoints._checkpoint_without_reentrant_generator
    fused = fuse(make_models(StraightThrough))
    fused(batches(1)[0])
    assert before == (checkpoints.CheckpointFunction, checkpoints._checkpoint_without_reentrant_generator)
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_a_checkpoint_drops_the_same_elements_again():
    class Drops(Checkpointed):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

    class Plain(Drops):
        def forward(self, x):
            return self.layer(self.inner(self.layer(x)))

    gradients = []
    for make in (Drops, Plain):
        fused = fuse(make_models(make))
        fused(batches(1)[0]).square().sum().backward()
        gradients.append([parameter.grad for parameter in fused.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_hooks_that_parameters_had_before_act_on_each_trials_gradient():
    models = make_models(lambda: nn.Linear(6, 6))
    for number, model in enumerate(models):
        model.weight.register_hook(lambda g, n=number: g / g.norm() * (n + 1))
    x = batches(1)[0]
    for unfused in ([], [""]):
        fused = fuse(models, unfused=unfused)
        fused(x).square().sum().backward()
        assert fused.module.weight.grad.flatten(1).norm(dim=1).tolist() == pytest.approx([1.0, 2.0, 3.0])


class CountingHook(Base):
    """Every third gradient of a weight is another."""

    def __init__(self):
        super().__init__()
        calls = [0]

        def hook(grad):
            calls[0] += 1
            return grad * 5 if calls[0] % 3 == 0 else grad

        self.layer.weight.register_hook(hook)

    def forward(self, x):
        return self.layer(x)


def test_a_hook_that_counts_is_refused_and_keeps_its_count():
    models = make_models(CountingHook)
    with pytest.raises(
        FusionError, match="'layer.weight' of model 0 has a hook that changes the variable calls"
    ):
        fuse(models)
    x = batches(1)[0]
    first, _, third = (torch.autograd.grad(models[0](x).sum(), models[0].layer.weight)[0] for _ in range(3))
    torch.testing.assert_close(third, first * 5)


class Number(Base):
    def __init__(self, value, use):
        super().__init__()
        self.value, self.use = value, use

    def forward(self, x):
        return self.use(self, x)


USES = {
    "shared input": lambda m, x: m.layer(x * m.value),
    "shared input divided": lambda m, x: m.layer((x - 0.5) / m.value),
    "function of shared input": lambda m, x: m.layer(F.leaky_relu(x, m.value)),
    "abs": lambda m, x: m.layer(x) * abs(-m.value),
    "round": lambda m, x: m.layer(x) * round(m.value, 1),
    "floor division": lambda m, x: m.layer(x) * (m.value // 0.07),
    "modulo": lambda m, x: m.layer(x) * (m.value % 0.15),
    "tensor": lambda m, x: m.layer(x) * torch.tensor(m.value),
    "tensor of a list": lambda m, x: m.layer(x) * torch.tensor([m.value] * 6),
    "full": lambda m, x: m.layer(x) * torch.full((6,), m.value),
    "range": lambda m, x: m.layer(x) * (torch.arange(6.0) * m.value),
    "linspace": lambda m, x: m.layer(x) * torch.linspace(0, m.value, 6),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_number_of_each_trials_own_is_used_wherever_torch_or_python_reads_it(use):
    torch.manual_seed(0)
    models = [Number(0.2 + 0.2 * k, use).double() for k in range(3)]
    fused = fuse(models)
    x = batches(1)[0, 0]
    together = fused(Shared(x))
    for number, model in enumerate(models):
        torch.testing.assert_close(together[number], model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use", [math.sqrt, math.exp, math.log1p])
def test_a_number_that_c_code_reads_is_not_a_number_rather_than_another_trials(use):
    models = [Number(0.2 + 0.2 * k, lambda m, x: m.layer(x) * use(m.value)).double() for k in range(3)]
    assert fuse(models)(batches(1)[0]).isnan().all()
    assert list(fuse(models, verify=list(batches(2)[:, 0])).unfused) == [""]


@pytest.mark.parametrize("use", [int, math.floor, math.ceil, round, float])
def test_one_number_made_of_several_is_refused(use):
    fused = fuse([Number(0.2 + 2 * k, lambda m, x: m.layer(x) * use(m.value)).double() for k in range(3)])
    with pytest.raises(FusionError, match="makes one number of a hyperparameter that differs"):
        fused(batches(1)[0])


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: torch.empty(h.shape).cauchy_(),
        lambda h: torch.poisson(torch.ones(h.shape)),
    ],
)
def test_numbers_from_the_generator_that_all_share_are_refused(draw):
    fused = fuse([Number(1.0, lambda m, x: m.layer(x) * draw(x)).double() for _ in range(2)])
    with pytest.raises(FusionError, match="draws from torch's generator"):
        fused(batches(1, trials=2)[0])


def test_a_generator_of_the_users_own_gives_its_numbers():
    def use(model, x):
        return model.layer(x) @ torch.randn(6, 6, dtype=x.dtype, generator=torch.Generator().manual_seed(5))

    models = [Number(1.0, use).double() for _ in range(2)]
    x = batches(1, trials=2)[0]
    together = fuse(models)(x)
    for number, model in enumerate(models):
        torch.testing.assert_close(together[number], model(x[number]), rtol=1e-12, atol=1e-12)


class Scripted(Base):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double())

    def forward(self, x):
        return self.layer(self.inner(x))

    def double(self):  # torch loses the leaves of scripted modules in a conversion
        self.layer.double()
        return self


def test_a_scripted_module_runs_trial_by_trial_and_trains_as_it_does_alone():
    models = make_models(Scripted)
    fused = fuse(models)
    assert fused.unfused == {"inner": "it is a scripted module"}
    optimizer = FusedOptimizer(fused, "sgd", lr=0.05)
    for x in batches(3):
        optimizer.zero_grad()
        fused(x).square().sum().backward()
        optimizer.step()
    for number, model in enumerate(models):
        lone = torch.optim.SGD(model.parameters(), lr=0.05)
        for x in batches(3):
            lone.zero_grad()
            model(x[number]).square().sum().backward()
            lone.step()
        for key, value in fused.trial(number).state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=1e-10)


def in_threads(works):
    """What each returned or raised, one thread each."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
    return [future.exception() or future.result() for future in futures]


class Meeting(Base):
    """Begins or ends a call only when those of the other threads do, too."""

    barrier = None

    def forward(self, x):
        self.meet()
        y = checkpoints.checkpoint(lambda h: Sign.apply(self.layer(h)), x, use_reentrant=False)
        self.meet()
        return y

    def meet(self):
        if self.barrier is not None:
            self.barrier.wait(10)


def test_fused_modules_of_other_sizes_run_in_several_threads(monkeypatch):
    fused = [fuse(make_models(Meeting, count), verify=False) for count in (2, 3, 4)]
    inputs = [torch.randn(len(each.split()), 4, 6).double() for each in fused]
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(len(fused)))

    def trained(module, x):
        y = module(x)
        y.square().sum().backward()
        return y, [p.grad.clone() for p in module.parameters()]

    together = in_threads([partial(trained, *pair) for pair in zip(fused, inputs)])
    monkeypatch.setattr(Meeting, "barrier", None)
    for (y, gradients), module, x in zip(together, fused, inputs):
        module.zero_grad()
        wanted, wanted_gradients = trained(module, x)
        assert torch.equal(y, wanted)
        assert all(map(torch.equal, gradients, wanted_gradients))


def test_a_fused_module_that_runs_in_another_thread_is_refused(monkeypatch):
    fused = fuse(make_models(Meeting, 2), verify=False)
    x = torch.randn(2, 4, 6).double()
    entered, left = threading.Event(), threading.Event()
    meeting = iter([entered.set, lambda: left.wait(10)])
    monkeypatch.setattr(Meeting, "meet", lambda self: next(meeting)())

    def second():
        entered.wait(10)
        try:
            return fused(x)
        finally:
            left.set()

    first, refused = in_threads([lambda: fused(x), second])
    assert isinstance(refused, FusionError)
    assert "in another thread" in str(refused)
    meeting = iter([bool, bool])
    assert torch.equal(fused(x), first)
