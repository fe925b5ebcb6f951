"""Signals of runs: the same on all workers, and what their gradients say when computed one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.adapt.monitors.gradient_noise import GradientAverages, GradientNorms, estimate
from plait.adapt.monitors.step_times import StepTimer, Throughput, WorkerTimes, stragglers
from plait.core import events
from plait.core.run_events import Signals
from plait.data.loader import to_device
from plait.data.sampler import Position, batches, share
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    OptimizerSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
    VerifySettings,
)
from plait.schema.topology_spec import read_topology_spec
from plait.training import components
from plait.training.choose_engine import make_loop
from support.averaging import job_store
from support.plans import planned, unverified_plan
from support.training import PlainWorker, digits_job
from support.world import run_ranks

# Weights that stay where they are, so that each step's gradients can be computed again.
STILL = digits_job(
    optimizer=OptimizerSettings("sgd", {"lr": 0.0}),
    data=DataSettings("digits", 50),
    steps=6,
    clip_norm=0.01,
    monitor=("noise-scale", "variance"),
    # A step that is taken twice is not timed.
    verify=VerifySettings(audit="off"),
)


def signals_of(
    rank: int, size: int, settings: TrainSettings, folder: Path, resume: bool = False
) -> list[Signals]:
    """What a worker's policies would see."""
    torch.set_num_threads(1)
    parts = components.build(settings, torch.device("cpu"))
    loop = make_loop(PlainWorker(), settings, parts, RunDir(folder))
    loop.train(resume)
    return list(loop.run.trial.signals.newest())


def gradients_of(settings: TrainSettings, parts: int, measured: int) -> list[GradientNorms]:
    """The norms of each step, from the gradients of the first `measured` of `parts` of each batch."""
    built = components.build(settings, torch.device("cpu"))
    data = built.train_set
    order = batches(Position(), len(data), settings.data.batch_size, seed=0, shuffle=True, keep_last=True)

    def gradient(samples: Any) -> torch.Tensor:
        inputs, target = to_device(data.batch(0, list(samples), 0), built.device, built.dtype)
        loss = built.loss(built.model(inputs), target)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(built.model.parameters()))])

    found = []
    for batch, _ in zip(order, range(settings.steps or 0)):
        cut = [share(batch.samples, i, parts) for i in range(parts)][:measured]
        weights = [len(part) / len(batch.samples) for part in cut]
        squares = sum(w * float(gradient(part).square().sum()) for w, part in zip(weights, cut))
        whole = float(gradient(batch.samples).square().sum())
        found.append(GradientNorms(squares, sum(weights), len(cut), whole, len(batch.samples)))
    return found


def moments(norms: list[GradientNorms]) -> list[tuple[Any, ...]]:
    averages, found = GradientAverages(), []
    for each in norms:
        averages.update(each)
        found.append((averages.variance, averages.squared_norm, averages.noise_scale))
    return found


def shown(signals: list[Signals]) -> list[tuple[Any, ...]]:
    return [(s.variance, s.squared_norm, s.noise_scale) for s in signals]


@pytest.mark.parametrize(("topology", "accumulate"), [("star", 1), ("native", 2)])
def test_three_workers_measure_what_their_gradients_say(topology: str, accumulate: int, tmp_path: Path):
    """In uneven shares of 16, 17 and 17 samples, also where workers accumulate; gradients are clipped."""
    settings = dataclasses.replace(STILL, topology=read_topology_spec(topology), accumulate=accumulate)
    found = run_ranks(3, signals_of, 3, settings, tmp_path)
    assert found[0] == found[1] == found[2], "all workers see the same"
    assert [s.step for s in found[0]] == [1, 2, 3, 4, 5], "those of the last step would come with the next"
    expected = moments(gradients_of(settings, 3, 3))[:5]
    for seen, direct in zip(shown(found[0]), expected, strict=True):
        assert seen == pytest.approx(direct, rel=1e-8)
    last = found[0][-1]
    assert (last.workers, last.batch_size, last.topology, last.sync) == (3, 50, topology, "all-reduce")
    assert len(last.work_s) == len(last.link_bytes_per_s) == 3
    assert last.step_s >= max(last.work_s)
    log = [r.event for r in events.read(RunDir(tmp_path).events()) if isinstance(r.event, Signals)]
    assert log == found[0]


def test_one_worker_measures_by_its_first_microbatch(tmp_path: Path):
    settings = dataclasses.replace(STILL, accumulate=4)
    found = signals_of(0, 1, settings, tmp_path)
    expected = moments(gradients_of(settings, 4, 1))
    assert len(found) == 6
    for seen, direct in zip(shown(found), expected, strict=True):
        assert seen == pytest.approx(direct, rel=1e-8)


def test_a_resumed_run_goes_on_with_its_averages_and_signals(tmp_path: Path):
    settings = dataclasses.replace(STILL, accumulate=4)
    whole = signals_of(0, 1, settings, tmp_path / "whole")
    signals_of(0, 1, dataclasses.replace(settings, steps=3), tmp_path / "part")
    resumed = signals_of(0, 1, settings, tmp_path / "part", resume=True)
    assert shown(resumed) == shown(whole)


def test_one_worker_without_microbatches_says_that_it_cannot(tmp_path: Path, caplog):
    found = signals_of(0, 1, STILL, tmp_path)
    assert "use accumulate: 2 or more, or more workers" in caplog.text
    assert found[-1].noise_scale is None
    assert found[-1].loss is not None
    assert found[-1].samples_per_s > 0


@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [((2, 1), Schedule.FLUSH), pytest.param((1, 1), Schedule.ZERO_BUBBLE, marks=pytest.mark.extended)],
)
def test_stages_add_up_to_what_the_whole_models_gradients_say(replicas, schedule, tmp_path: Path):
    """Of each stage the first of four microbatches counts; gradients are clipped afterwards."""
    same = {key: getattr(STILL, key) for key in ("optimizer", "data", "steps", "clip_norm", "monitor")}
    settings = unverified_plan(replicas, schedule, microbatches=4, log_every_steps=1, **same)
    found = run_ranks(sum(replicas), signals_of, sum(replicas), settings, tmp_path)
    assert all(other == found[0] for other in found)
    expected = moments(gradients_of(settings, 4, 1))
    for seen, direct in zip(shown(found[0]), expected, strict=True):
        assert seen == pytest.approx(direct, rel=1e-8)
    assert len(found[0][-1].work_s) == sum(replicas)


def test_an_asynchronous_pipeline_says_that_it_has_no_norms_and_gives_the_rest(tmp_path: Path, capfd):
    settings = planned(
        (1, 1),
        Schedule.STASH,
        monitor=("noise-scale",),
        steps=5,
        verify=VerifySettings(audit="off"),
    )
    found = run_ranks(2, signals_of, 2, settings, tmp_path)[0]
    assert [s.step for s in found] == [1, 2, 3, 4, 5]
    assert found[-1].noise_scale is None
    assert found[-1].samples_per_s > 0


def apart(rank: int, address: str, settings: TrainSettings, folder: Path) -> list[Signals]:
    """What a worker's policies would see where workers go at their own pace."""
    worker = PlainWorker(address=address)
    parts = components.build(settings, torch.device("cpu"))
    loop = make_loop(worker, settings, parts, RunDir(folder))
    loop.train(resume=False)
    return list(loop.run.trial.signals.newest())


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (2, {"minimum": 2}),
        pytest.param(1, {"minimum": 2, "average": "gradients"}, marks=pytest.mark.extended),
    ],
)
def test_workers_under_partial_reduce_measure_the_same_moments_as_one(
    accumulate: int, options: dict[str, Any], tmp_path: Path
):
    """Many updates of small shares; which worker takes which share differs from run to run."""
    settings = dataclasses.replace(
        STILL,
        clip_norm=None,
        steps=40,
        accumulate=accumulate,
        sync=SyncSettings("partial-reduce", options),
        evaluate=EvaluateSettings(every_steps=20),
    )
    with job_store() as address:
        found = run_ranks(2, apart, address, settings, tmp_path)
    assert found[0] == found[1], "all workers see the same"
    assert [s.step for s in found[0]] == [20, 40]
    last = found[0][-1]
    direct = [estimate(each) for each in gradients_of(settings, 2, 2)]
    expected = sum(each.variance for each in direct) / len(direct)
    assert last.variance == pytest.approx(expected, rel=0.2)
    assert len(last.work_s) == 2
    assert last.sync == "partial-reduce"


def test_a_slow_worker_shows_in_its_own_time_and_not_in_the_links(tmp_path: Path):
    settings = dataclasses.replace(STILL, steps=12, slow=SlowSettings({1: 20.0}), monitor=("step-time",))
    (found, _) = run_ranks(2, signals_of, 2, settings, tmp_path)
    late = [stragglers(s.work_s, 1.5) for s in found if s.work_s]
    assert late.count((1,)) > len(late) / 2
    assert all(s.noise_scale is None for s in found), "norms that nobody asked for are not taken"


def test_the_wait_for_a_slow_worker_is_no_time_of_the_links():
    times = WorkerTimes(work_s=(1.0, 3.0), sum_s=(2.5, 0.5))
    assert times.link_s() == pytest.approx((0.5, 0.5))
    assert times.link_bytes_per_s(100) == pytest.approx((200.0, 200.0))
    assert times.step_s == 3.5
    assert not WorkerTimes((0.0, 1.0), (0.0, 1.0)).known


def test_a_step_after_an_interruption_is_not_timed():
    now = [0.0]
    timer = StepTimer(lambda: now[0])
    lasts = []
    for seconds, pauses in ((1.0, False), (2.0, False), (5.0, True), (3.0, False)):
        if pauses:
            timer.pause()
        now[0] += seconds
        timer.begin_sum()
        now[0] += 0.5
        timer.end_sum()
        lasts.append(timer.last)
    assert lasts == [(0.0, 0.0), (2.0, 0.5), (0.0, 0.0), (3.0, 0.5)]


def test_throughput_is_that_of_the_last_steps():
    now = [0.0]
    meter = Throughput(window=2, clock=lambda: now[0])
    assert meter.value is None
    for seconds in (10.0, 1.0, 1.0):
        now[0] += seconds
        meter.update(8)
    assert meter.value == pytest.approx(8.0)
