"""Workers at their own pace: every sample once, nobody held up, and the end of a worker is not the run's."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core import run_events
from plait.core.errors import JobError
from plait.core.events import read
from plait.jobs.train import train
from plait.launcher.run_dir import RunDir
from plait.pipeline.executor import PipelineExecutor
from plait.planner.schedules.in_flight import Schedule
from plait.schema.job import make_job
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
    VerifySettings,
)
from plait.training import components
from plait.training.checkpoint import list_checkpoints
from plait.training.choose_engine import make_job_loop
from plait.training.engines import choose_pipeline_sync
from plait.training.engines.choose_sync import choose
from plait.training.engines.decentralized import DecentralizedEngine
from plait.training.engines.train_step import TrainStep
from support.averaging import job_store, open_store
from support.further import but_further
from support.plans import unverified_plan
from support.syncs import run_sync, settings_of
from support.training import PlainWorker, largest_difference, train_rank
from support.world import run_ranks

TESTS = str(Path(__file__).parent.parent)


def job(folder: Path, sync: str = "partial-reduce", workers: int = 3, **changes: Any) -> dict[str, Any]:
    parallel = {"workers": workers, "sync": sync, **changes.pop("parallel", {})}
    return {
        "name": "t",
        "model": "support.training:small_net",
        "data": {"kind": "digits", "batch_size": 48},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "steps": 30,
        "parallel": parallel,
        "cluster": {
            "environment": {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}
        },
        "run_dir": str(folder / "runs"),
        **changes,
    }


class Watch:
    """A display that acts once, when the run has come to a step."""

    def __init__(self, at_step: int = 0, act: Any = None) -> None:
        self.lines: list[str] = []
        self.workers: Any = ()
        self._at_step = at_step
        self._act = act

    def started(self, workers: Any) -> None:
        self.workers = workers

    def progressed(self, progress: Mapping[str, Any]) -> None:
        if self._act is not None and progress["step"] >= self._at_step:
            self._act(self)
            self._act = None

    def printed(self, line: str) -> None:
        self.lines.append(line)

    def stopping(self) -> None:
        pass


def all_events(run: Path) -> dict[int, list[Any]]:
    files = sorted((run / "events").glob("rank*.jsonl"))
    return {int(f.stem.removeprefix("rank")): [r.event for r in read(f)] for f in files}


def train_idly(rank: int, settings: TrainSettings, folder: Path, address: str) -> Any:
    """Train as one of several workers, of which the first gets no work."""
    if rank == 0:
        DecentralizedEngine._items = lambda *_: iter(())  # type: ignore[method-assign]
    return train_rank(rank, settings, folder, address=address)


def test_the_first_worker_records_steps_in_which_only_others_work(tmp_path: Path):
    with job_store() as address:
        run_ranks(2, train_idly, settings_of("partial-reduce", steps=6), tmp_path, address)
    steps = [event for event in all_events(tmp_path)[0] if isinstance(event, run_events.Step)]
    assert sum(event.samples for event in steps) == 6 * 48
    assert [event.step for event in steps] == [6]
    assert 0 < steps[0].loss < 5


def test_a_run_learns_uses_every_sample_once_and_records_each_workers_pace(tmp_path: Path):
    settings = settings_of(
        "partial-reduce",
        steps=None,
        epochs=2,
        evaluate=EvaluateSettings(every_steps=15),
        slow=SlowSettings({2: 3.0}),
    )
    found = run_sync(3, settings, tmp_path)
    result = found[0][0]
    assert result.reason == "finished"
    assert result.test["accuracy"] > 0.8
    assert largest_difference(found[0][1], found[2][1]) == 0
    recorded = all_events(tmp_path)
    paces = [[e for e in recorded[rank] if isinstance(e, run_events.Pace)] for rank in range(3)]
    assert sum(p.samples for own in paces for p in own) == 2 * 1442
    settled = [e for e in recorded[1] if isinstance(e, run_events.Settled)]
    assert [e.step for e in settled] == [15, 30, 45, 60, 62]
    assert {e.members for e in settled} == {(0, 1, 2)}
    assert sum(e.samples for e in recorded[0] if isinstance(e, run_events.Step)) == 2 * 1442


def train_with_loaders(rank: int, port: int, settings: TrainSettings, folder: Path) -> Any:
    """As `train_rank`, with loaders that start at once."""
    multiprocessing.set_start_method("fork", force=True)
    return train_rank(rank, settings, folder, address=port)


def test_loaders_read_ahead_and_every_sample_is_used_once(tmp_path: Path):
    epoch = {"steps": None, "epochs": 1, "data": DataSettings("digits", 48, loaders=2)}
    slow = {"slow": SlowSettings({1: 20.0}), "verify": VerifySettings()}
    settings = settings_of("partial-reduce", **epoch, **slow)
    with job_store() as port:
        found = run_ranks(2, train_with_loaders, port, settings, tmp_path)
    assert largest_difference(found[0][1], found[1][1]) == 0
    paces = [
        [e.samples for e in own if isinstance(e, run_events.Pace)] for own in all_events(tmp_path).values()
    ]
    assert sum(map(sum, paces)) == 1442
    # What the loaders of the slow one had read, the other took over.
    assert sum(paces[0]) > 2 * sum(paces[1])


# One is killed, and replaced, in faults/test_elastic.py, and the rest finishes in test_elastic_averaging.py.
@pytest.mark.extended
@pytest.mark.usefixtures("forked_commands")
def test_a_worker_killed_in_a_run_is_named_and_the_rest_finishes(tmp_path: Path):
    rank = 0
    watch = Watch(8, lambda w: os.kill(w.workers[rank].pid, signal.SIGKILL))
    content = job(tmp_path, evaluate={"every_steps": 15}, parallel={"jitter": [1.0, 0.03]})
    result = train(make_job(content), display=watch)
    assert (result.reason, result.step) == ("finished", 30)
    assert result.test["accuracy"] > 0.5
    assert any(f"worker {rank} on localhost is lost (ended by SIGKILL)" in line for line in watch.lines)
    changes = [e for e in all_events(Path(result.run))[1] if isinstance(e, run_events.WorkersChanged)]
    assert [(e.members, e.lost) for e in changes] == [((1, 2), (rank,))]
    assert list_checkpoints(RunDir(Path(result.run)).checkpoints)[0].name == f"step-{result.step:09d}"


def stop_after_twelve_updates(rank: int, address: str, settings: TrainSettings, folder: Path) -> Any:
    """The second worker asks to stop after its twelfth update."""
    return train_rank(rank, settings, folder, address=address, stop_after=11 if rank == 1 else math.inf)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path):
    settings = settings_of("partial-reduce", slow=SlowSettings(jitter=(1.0, 0.01)))
    with job_store() as address:
        first = run_ranks(3, stop_after_twelve_updates, address, settings, tmp_path)[0][0]
    assert first.reason == "stopped"
    # A step has a share for each of three workers.
    assert 12 // 3 <= first.step < 30
    second = run_sync(3, settings, tmp_path, resume=True)[0][0]
    assert (second.reason, second.step) == ("finished", 30)
    paces = [e for own in all_events(tmp_path).values() for e in own if isinstance(e, run_events.Pace)]
    assert sum(e.samples for e in paces) == 30 * 48


# What is written to the store is the same for all but AD-PSGD, which writes more.
@pytest.mark.parametrize("sync", but_further(("pair-sync", "local-sgd", "ad-psgd"), "pair-sync", "local-sgd"))
def test_the_store_holds_no_more_keys_after_a_long_run_than_after_a_short_one(sync: str, tmp_path: Path):
    counts = []
    often = {"evaluate": EvaluateSettings(every_steps=2, batch_size=400), "verify": VerifySettings()}
    for steps in (4, 10):  # the last steps of both are audited
        settings = settings_of(sync, steps=steps, **often)
        with job_store() as address:
            run_ranks(2, train_rank, settings, tmp_path / str(steps), address=address)
            counts.append(open_store(address).num_keys())
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"sync": "partial-reduce", "sync_options": {"windw": 0.1}}, "parallel.sync_options: unknown field"),
        ({"sync": "partial-reduce", "sync_options": {"minimum": 9}}, "sync_options.minimum: found 9"),
        ({"sync": "auto", "sync_options": {"every": 3}}, "parallel.sync_options: found options"),
        ({"sync": "auto", "plan": "auto", "elastic": True}, "sync: found 'auto' with parallel.elastic and"),
        ({"sync": "all-reduce", "slow": {7: 2.0}}, "parallel.slow: found 7: 2.0"),
        ({"sync": "all-reduce", "jitter": [2.0, 0.1]}, "parallel.jitter: found"),
    ],
)
def test_wrong_syncs_are_refused_with_the_key(parallel: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(JobError, match=words.replace("[", r"\[")):
        make_job(job(tmp_path, parallel=parallel))


def test_auto_takes_all_reduce_for_workers_of_one_speed_and_partial_reduce_for_unlike_ones():
    alike, slow = [0.1, 0.11, 0.1], [0.4, 0.4, 0.41]
    assert choose([[alike] * 4]).sync == "all-reduce"
    found = choose([[alike, alike, slow, alike]])
    assert found.sync == "partial-reduce"
    assert "403 ms together" in found.reason
    # Stumbles that hit one worker at a time hold all up under all-reduce.
    assert choose([[[0.1, 0.6, 0.1], [0.6, 0.1, 0.1], [0.1, 0.1, 0.6]]]).sync == "partial-reduce"
    # Nobody waits for those of another group.
    assert choose([[alike, alike], [slow, slow]]).sync == "all-reduce"


def choose_in_a_world(
    rank: int, port: int, settings: TrainSettings, folder: Path, step_s: tuple[float, float]
) -> str:
    """The trainer that `auto` takes where steps of a worker, or a pipeline, are taken for so long.

    A run that is resumed goes on with the same, however long steps take then.
    """
    measure, measure_update = TrainStep.time_backward, choose_pipeline_sync.time_update
    times = step_s

    def time_backward(engine: TrainStep, batch: Any) -> float:
        assert measure(engine, batch) > 0
        return times[rank]

    def time_update(pipeline: PipelineExecutor, *arguments: Any) -> float:
        assert measure_update(pipeline, *arguments) > 0
        # Only the times of a pipeline's first worker count.
        return times[rank] if rank < len(times) else 9.0

    TrainStep.time_backward = time_backward  # type: ignore[method-assign]
    choose_pipeline_sync.time_update = time_update
    parts = components.build(settings, torch.device("cpu"))
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    loop: Any = make_job_loop(PlainWorker(address=port), settings, parts, RunDir(folder))
    assert largest_difference(before, parts.model.state_dict()) == 0
    assert loop.train(resume=False).reason == "finished"
    times = (0.1, 0.4) if step_s[0] == step_s[1] else (0.1, 0.1)
    again: Any = make_job_loop(PlainWorker(address=port), settings, parts, RunDir(folder), resume=True)
    assert type(again.engine) is type(loop.engine)
    return type(loop.engine).__name__


NORM: dict[str, Any] = {"model": ModelSettings("support.training:norm_net"), "steps": 2}


@pytest.mark.parametrize(
    ("stages", "step_s", "sync", "engine"),
    [
        pytest.param((), (0.1, 0.1), "all-reduce", "WholeModelEngine", marks=pytest.mark.extended),
        ((), (0.1, 0.4), "partial-reduce", "DecentralizedEngine"),
        ((2, 2), (0.1, 0.1), "all-reduce", "PipelineEngine"),
        pytest.param((2, 2), (0.1, 0.4), "partial-reduce", "DecentralizedEngine", marks=pytest.mark.extended),
    ],
)
def test_auto_measures_the_workers_and_leaves_the_model_as_it_was(
    stages: tuple[int, ...], step_s: tuple[float, float], sync: str, engine: str, tmp_path: Path
):
    settings = settings_of("auto", **NORM)
    if stages:
        settings = replace(unverified_plan(stages, Schedule.FLUSH, **NORM), sync=SyncSettings("auto"))
    with job_store() as port:
        found = run_ranks(sum(stages) or 2, choose_in_a_world, port, settings, tmp_path, step_s)
    assert set(found) == {engine}
    (chosen,) = [e for e in all_events(tmp_path)[0] if isinstance(e, run_events.SyncChosen)]
    assert chosen.sync == sync
