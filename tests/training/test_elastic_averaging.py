"""Workers that average weights and come, leave or are lost while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core import events
from plait.core.run_events import Pace, SyncChosen, WorkersChanged
from plait.schema.settings import EvaluateSettings, ModelSettings, SlowSettings
from plait.training import checkpoint
from support.elastic import membership, run_elastic
from support.syncs import settings_of
from support.training import largest_difference

SYNCS: list[tuple[str, dict[str, Any]]] = [
    ("partial-reduce", {}),
    ("ad-psgd", {}),
    ("pair-averaging", {}),
    ("pair-sync", {}),
    ("sma", {}),
    ("local-sgd", {"every": 3}),
    ("local-sgd", {"every": 3, "outer": "nesterov"}),
    ("hetpipe", {"servers": 2}),
]
NAMES = [f"{kind}-{options['outer']}" if "outer" in options else kind for kind, options in SYNCS]
# AD-PSGD averages in pairs at their own pace, too; local SGD with an outer optimizer is local SGD and more.
FURTHER = ("pair-averaging", "local-sgd")


def syncs_but(*further: str) -> list[Any]:
    """The syncs for `parametrize`; `further` are for `make test-all`."""
    marks = [pytest.mark.extended if name in further else () for name in NAMES]
    return [pytest.param(*each, marks=own) for each, own in zip(SYNCS, marks)]


def recorded(folder: Path, kind: type[Any]) -> list[Any]:
    files = sorted((folder / "events").glob("rank*.jsonl"))
    return [line.event for file in files for line in events.read(file) if isinstance(line.event, kind)]


@pytest.mark.parametrize(
    ("sync", "options"), syncs_but(*FURTHER, "pair-sync", "sma", "ad-psgd", "local-sgd-nesterov"), ids=NAMES
)
def test_workers_join_and_leave_and_every_sample_is_used_once(
    sync: str, options: dict[str, Any], tmp_path: Path
):
    settings = settings_of(sync, options, steps=None, epochs=2, evaluate=EvaluateSettings(every_steps=15))
    versions = [(0, (0, 1)), (7, (0, 1, 2)), (20, (1, 2)), (33, (2,)), (45, (2, 3))]
    found = run_elastic(settings, tmp_path, versions)
    assert [each["result"] and each["result"].reason for each in found] == [*[None] * 2, *["finished"] * 2]
    assert largest_difference(found[2]["weights"], found[3]["weights"]) == 0.0
    assert found[2]["result"].step == 62
    assert found[2]["result"].test["accuracy"] > 0.7
    assert sum(pace.samples for pace in recorded(tmp_path, Pace)) == 2 * 1442
    changes = recorded(tmp_path, WorkersChanged)
    assert [change.members for change in changes] == [members for _, members in versions[1:]]
    assert [change.left for change in changes] == [(), (0,), (1,), ()]


@pytest.mark.parametrize(
    ("first", "sync"),
    [((0, 1), "partial-reduce"), pytest.param((0,), "all-reduce", marks=pytest.mark.extended)],
)
def test_workers_that_join_a_run_take_over_the_sync_that_its_first_workers_chose(
    first: tuple[int, ...], sync: str, tmp_path: Path
):
    # One worker that is far slower than the other makes it worth not to wait; one alone has no choice.
    settings = settings_of("auto", {}, steps=30, slow=SlowSettings({1: 6.0}))
    found = run_elastic(settings, tmp_path, [(0, first), (7, (0, 1, 2)), (20, (1, 2))])
    assert [each["sync"] for each in found] == [sync] * 3
    assert [each["result"] and each["result"].reason for each in found] == [None, "finished", "finished"]
    assert largest_difference(found[1]["weights"], found[2]["weights"]) == 0.0
    assert [event.sync for event in recorded(tmp_path, SyncChosen)] == [sync]


@pytest.mark.parametrize(
    ("victim", "sync", "options"),
    [
        pytest.param(i % 3, *each.values, marks=each.marks)
        for i, each in enumerate(syncs_but(*FURTHER, "pair-sync", "sma", "ad-psgd"))
    ],
    ids=NAMES,
)
def test_where_a_worker_dies_the_rest_finishes_the_run_with_equal_weights(
    victim: int, sync: str, options: dict[str, Any], tmp_path: Path
):
    settings = settings_of(
        sync,
        options,
        model=ModelSettings("support.elastic:MortalNet", {"dies_at": 7}),
        evaluate=EvaluateSettings(every_steps=15),
    )
    rest = tuple(rank for rank in range(3) if rank != victim)
    after = membership(2, rest, lost=(victim,))
    found = run_elastic(settings, tmp_path, [(0, (0, 1, 2))], victim=victim, after_loss=after)
    one, other = (found[rank] for rank in rest)
    assert (one["result"].reason, one["result"].step) == ("finished", 30)
    assert largest_difference(one["weights"], other["weights"]) == 0.0
    (change,) = recorded(tmp_path, WorkersChanged)
    assert (change.members, change.lost) == (rest, (victim,))
    # The checkpoint of the end is what all hold.
    (last, *_) = checkpoint.list_checkpoints(tmp_path / "checkpoints")
    assert checkpoint.load(last).step == 30
