"""A fused optimizer where torch's own stand: schedulers, groups, scalers, frozen weights, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fused_checks import CLOSE, fuse, make_models
from test_fused_optimizer_states import assert_same, batch, net, step_alone, step_fused
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from plait.fusion import (
    FusedOptimizer,
    FusionError,
    fuse_optimizers,
    keep_trials,
    replace_trial,
    split_optimizer,
)

TRIALS = 3
RATES = [0.01, 0.02, 0.05]

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=1e-4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "warmup, then exponential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_change_the_rate_of_each_trial_as_alone(name):
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, "adam", lr=RATES)
    lone = [torch.optim.Adam(m.parameters(), lr=rate) for m, rate in zip(models, RATES)]
    schedules = [SCHEDULERS[name](one) for one in (optimizer, *lone)]
    for step in range(6):
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for model, own, inputs in zip(models, lone, x):
            step_alone(model, own, inputs)
        for schedule in schedules:
            schedule.step()
    assert_same(fused, models)


OWN_SCHEDULERS = [
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
]


def test_a_trial_takes_a_scheduler_of_its_own_until_it_leaves():
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, "adamw", params=grouped(fused.module), lr=RATES)
    lone = [torch.optim.AdamW(grouped(m), lr=rate) for m, rate in zip(models, RATES)]
    schedules = [make(optimizer.trial(number)) for number, make in enumerate(OWN_SCHEDULERS)]
    own_schedules = [make(own) for make, own in zip(OWN_SCHEDULERS, lone)]
    metrics = [1.0, 0.5, 0.5, 0.4, 0.6, 0.7, 0.1, 0.1]
    numbers = [0, 1, 2]
    for step, metric in enumerate(metrics):
        if step == 4:
            fused, optimizer, schedules = copy.deepcopy((fused, optimizer, schedules))
        if step == 6:
            numbers = [2, 0]
            keep_trials(fused, optimizer, numbers)
            with pytest.raises(FusionError, match="has left the array"):
                schedules[1].step()
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x[numbers])
        for number in numbers:
            step_alone(models[number], lone[number], x[number])
            for schedule in (schedules[number], own_schedules[number]):
                schedule.step(*[metric][: number == 2])
    rates = [group["lr"].values for group in optimizer.param_groups]
    assert rates == [tuple(lone[n].param_groups[i]["lr"] for n in numbers) for i in (0, 1)]
    assert_same(fused, [models[number] for number in numbers])
    replace_trial(fused, optimizer, 0, net().double(), 3)
    with pytest.raises(FusionError, match="another has taken its place"):
        schedules[2].step(9.0)
    assert optimizer.trial(1) is schedules[0].optimizer
    for what in (optimizer.trial(1).step, optimizer.trial(1).zero_grad):
        with pytest.raises(FusionError, match="FusedOptimizer"):
            what()
    with pytest.raises(FusionError, match="found 2, expected 0 to 1"):
        optimizer.trial(2)


def test_a_scheduler_that_needs_one_rate_takes_one_and_refuses_several():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        plateau.step(1.0)
    assert optimizer.groups[0].vectors["lr"].tolist() == pytest.approx([0.001] * TRIALS)
    optimizer.set(lr=RATES)
    with pytest.raises(FusionError, match="differs between trials.*give all trials one value"):
        plateau.step(1.0)


def test_a_rate_set_by_hand_is_that_of_the_next_step():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    before = [p.detach().clone() for p in fused.module.parameters()]
    optimizer.param_groups[0]["lr"] = [0.0, 0.1, 0.0]
    step_fused(fused, optimizer, batch(0, 4, 5))
    moved = [(p != own).flatten(1).any(1) for p, own in zip(fused.module.parameters(), before)]
    assert torch.stack(moved).any(0).tolist() == [False, True, False]


def grouped(model):
    """Weight decay for matrices alone, as transformers are trained, and a rate of their own for biases."""
    parameters = list(model.parameters())
    rank = min(p.dim() for p in parameters)
    low = [p for p in parameters if p.dim() == rank]
    high = [p for p in parameters if p.dim() > rank]
    return [{"params": high}, {"params": low, "weight_decay": 0.0, "lr": 0.05}]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_groups_of_parameters_move_with_their_own_numbers(kind):
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[kind]
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, kind, params=grouped(fused.module), lr=RATES, weight_decay=0.1)
    lone = [make(grouped(m), lr=rate, weight_decay=0.1) for m, rate in zip(models, RATES)]
    for step in range(5):
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for model, own, inputs in zip(models, lone, x):
            step_alone(model, own, inputs)
    assert_same(fused, models)
    modules = fused.split()
    again = fuse_optimizers(fuse(modules), split_optimizer(optimizer, modules), modules)
    assert [len(group["params"]) for group in again.param_groups] == [2, 2]
    assert [group["weight_decay"] for group in again.param_groups] == [0.1, 0.0]
    assert again.param_groups[0]["lr"].values == tuple(RATES)


def test_equal_parameters_in_unlike_groups_need_their_models():
    models = make_models(net, TRIALS)
    for model in models:
        nn.init.zeros_(model[0].bias)
        nn.init.zeros_(model[2].bias)
    groups = [[{"params": [m[0].bias]}, {"params": [m[2].bias], "lr": 1.0}] for m in models]
    lone = [torch.optim.SGD(own, lr=0.1) for own in groups]
    fused = fuse(models)
    with pytest.raises(FusionError, match="'0.bias' and '2.bias' are equal.*models=models"):
        fuse_optimizers(fused, lone)
    made = fuse_optimizers(fused, lone, models)
    assert made.param_groups[1]["params"] == [fused.module[2].bias]


def test_parameters_that_thaw_later_train_from_then_on():
    models = make_models(net, TRIALS)
    for model in models:
        model[0].requires_grad_(False)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, "adam", lr=RATES)
    lone = [torch.optim.Adam(m.parameters(), lr=rate) for m, rate in zip(models, RATES)]
    for step in range(6):
        if step == 2:
            for module in (fused.module, *models):
                module[0].requires_grad_(True)
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for model, own, inputs in zip(models, lone, x):
            step_alone(model, own, inputs)
    assert_same(fused, models)


def test_a_group_added_later_trains_from_then_on():
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, "adam", params=fused.module[2].parameters(), lr=RATES)
    lone = [torch.optim.Adam(m[2].parameters(), lr=rate) for m, rate in zip(models, RATES)]
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": fused.module[0].parameters(), "lr": 0.1})
            for model, own in zip(models, lone):
                own.add_param_group({"params": model[0].parameters(), "lr": 0.1})
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for model, own, inputs in zip(models, lone, x):
            step_alone(model, own, inputs)
    assert_same(fused, models)


def test_a_parameter_without_the_trials_axis_and_a_misspelt_option_of_a_group_are_refused():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "adam", params=fused.module[2].parameters())
    with pytest.raises(FusionError, match=r"shape \(5,\), expected .* 3 trials first"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    with pytest.raises(FusionError, match="'weight_dekay'.*did you mean 'weight_decay'"):
        optimizer.add_param_group({"params": fused.module[0].parameters(), "weight_dekay": 0.0})


def test_nothing_moves_without_gradients_or_with_all_frozen():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "adam", clip_norm=1.0)
    before = [p.detach().clone() for p in fused.module.parameters()]
    optimizer.step()
    fused.requires_grad_(False)
    FusedOptimizer(fused, "sgd", lr=0.1, momentum=0.9).step()
    assert all(torch.equal(p, own) for p, own in zip(fused.module.parameters(), before))
    assert optimizer.steps.tolist() == [0.0] * TRIALS


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)

    def closure():
        optimizer.zero_grad()
        losses = fused(batch(0, 4, 5)).square().mean((1, 2))
        losses.sum().backward()
        return losses

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert bool((second < first).all())


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_under_a_grad_scaler_only_trials_that_overflow_miss_a_step(kind):
    make = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[kind]
    models = [model.float() for model in make_models(net, TRIALS)]
    fused = fuse(copy.deepcopy(models))
    optimizer, scaler = FusedOptimizer(fused, kind, lr=RATES), torch.amp.GradScaler("cpu", init_scale=4.0)
    lone = [make(m.parameters(), lr=rate) for m, rate in zip(models, RATES)]
    for step in range(4):
        x = batch(step, 4, 5).float()
        if step == 2:
            x[1, 0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(fused(x).square().mean((1, 2)).sum()).backward()
        if step == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        for number, (model, own) in enumerate(zip(models, lone)):
            if (step, number) != (2, 1):
                step_alone(model, own, x[number])
    assert scaler.get_scale() == 2.0
    for own, model in zip(fused.split(), models):
        for found, wanted in zip(own.parameters(), model.parameters()):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    """Batch norm, a recurrent layer, a weight used twice, a hook on a gradient, what a forward leaves."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.memory = nn.GRU(5, 5, batch_first=True)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.first.bias.register_hook(double)
        self.seen = None

    def forward(self, x):
        x = self.memory(self.norm(x).unsqueeze(1))[0].squeeze(1)
        x = self.first(x)
        self.seen = x.detach()
        return self.second(x.tanh())


def double(gradient):
    return 2 * gradient


@pytest.mark.parametrize("unfused", [[], ["first"], ["norm", "memory"], [""]], ids=str)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_module_and_optimizer_goes_on_as_the_original(duplicate, unfused):
    fused = fuse(make_models(Tied, TRIALS), unfused=unfused)
    optimizer = FusedOptimizer(fused, "adam", params=grouped(fused.module), lr=RATES)
    step_fused(fused, optimizer, batch(0, 4, 5))
    copied, own = duplicate((fused, optimizer))
    copied.seeds.copy_(fused.seeds)
    start = fused.module.first.weight.detach().clone()
    for module, steps in ((fused, optimizer), (copied, own)):
        for step in range(1, 4):
            step_fused(module, steps, batch(step, 4, 5))
    assert not torch.equal(fused.module.first.weight, start)
    for found, wanted in zip(copied.state_dict().values(), fused.state_dict().values()):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_an_averaged_model_of_fused_trials_is_that_of_each_alone():
    models = make_models(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, "sgd", lr=RATES)
    lone = [torch.optim.SGD(m.parameters(), lr=rate) for m, rate in zip(models, RATES)]
    averaged, *others = (AveragedModel(m, use_buffers=True) for m in (fused, *models))
    for step in range(3):
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        averaged.update_parameters(fused)
        averaged(x)
        for model, own, inputs, other in zip(models, lone, x, others):
            step_alone(model, own, inputs)
            other.update_parameters(model)
            other(inputs)
    assert_same(averaged.module, [other.module for other in others])


def test_a_saved_state_of_other_groups_or_trials_is_refused():
    fused = fuse(make_models(net, TRIALS))
    saved = FusedOptimizer(fused, "adam", params=grouped(fused.module), lr=RATES).state_dict()
    with pytest.raises(FusionError, match=r"groups of \[2, 2\] parameters, expected 3 trials and \[4\]"):
        FusedOptimizer(fused, "adam").load_state_dict(saved)
    few = fuse(make_models(net, 2))
    optimizer = FusedOptimizer(few, "adam", params=grouped(few.module))
    with pytest.raises(FusionError, match="state of 3 trials .* expected 2 trials"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_of_torch_that_mix_trials_are_refused(
    kind: type[torch.optim.Optimizer],
):
    models = make_models(net, TRIALS)
    kind(models[0].parameters()).step(lambda: models[0](batch(0, 4, 5)[0]).square().mean())
    fused = fuse(models)
    optimizer = kind(fused.parameters())
    with pytest.raises(FusionError, match="trials would be updated by numbers of all of them"):
        optimizer.step(lambda: fused(batch(0, 4, 5)).square().sum())


def test_each_trial_is_clipped_by_its_own_norm_and_torchs_joint_clip_is_refused():
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    x = batch(0, 4, 5)
    fused(x).square().mean((1, 2)).sum().backward()
    for module in (fused.module, fused):
        with pytest.raises(FusionError, match=r"common norm; expected fused.clip_grad_norm_\(max_norm\)"):
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    norms = fused.clip_grad_norm_([0.1, 0.2, 1e9])
    for number, (model, limit) in enumerate(zip(models, (0.1, 0.2, 1e9))):
        model(x[number]).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        torch.testing.assert_close(norms[number], norm, **CLOSE)
        for found, wanted in zip(fused.module.parameters(), model.parameters()):
            torch.testing.assert_close(found.grad[number], wanted.grad, **CLOSE)


def test_hooks_of_a_step_run_and_a_profiler_sees_it_as_with_torchs_optimizers():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "adam", lr=RATES)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *given: calls.append(("every optimizer, before", *given))),
        optimizer.register_step_pre_hook(lambda *given: calls.append(("before", *given))),
        optimizer.register_step_post_hook(lambda *given: calls.append(("after", *given))),
        register_optimizer_step_post_hook(lambda *given: calls.append(("every optimizer, after", *given))),
    ]
    for hook in handles:  # with all hooks, then with fewer and fewer
        optimizer.step()
        hook.remove()
    optimizer.step()
    assert [name for name, *_ in calls] == [
        "every optimizer, before", "before", "after", "every optimizer, after",
        "before", "after", "every optimizer, after", "after", "every optimizer, after",
        "every optimizer, after",
    ]  # fmt: skip
    assert all(given == [optimizer, (optimizer,), {}] for _, *given in calls)
    with torch.profiler.profile() as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.key for event in profile.key_averages()}
    assert {
        "Optimizer.step#FusedOptimizer.step",
        "Optimizer.zero_grad#FusedOptimizer.zero_grad",
    } <= names


def test_gradients_are_reset_to_none_or_to_zeros_as_torch_does():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=RATES)
    for parameter in fused.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in fused.module.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in fused.module.parameters())


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_a_parameter_that_is_brought_into_another_order_goes_on_as_before(kind):
    models = [nn.Conv2d(3, 4, 3).double() for _ in range(2)]
    fused, other = fuse(models), fuse(models)
    optimizers = [FusedOptimizer(each, kind, lr=0.05) for each in (fused, other)]
    for step in range(4):
        x = torch.randn(2, 2, 3, 6, 6, dtype=torch.float64)
        if step == 2:
            fused.channels_last()
        for each, optimizer in zip((fused, other), optimizers):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(
        dict(fused.named_parameters()), dict(other.named_parameters()), rtol=0, atol=1e-12
    )
