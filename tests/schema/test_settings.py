"""Settings are declared once: the job file, the workers and the launcher share the classes that hold them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from plait.core.codec import decode, encode
from plait.schema import job_settings, placement, settings
from plait.schema.job import Job, make_job
from plait.schema.job_model import OpenSection, Section, model_of
from plait.schema.placement import HostAccess, Placement, WorkerLimits
from plait.schema.plans.schedules import Schedule
from plait.schema.settings import (
    ClusterSettings,
    CommonSettings,
    ParallelSettings,
    PipelineOptions,
    PipelineSettings,
    PlanRequest,
    TrainSettings,
    values_of,
)
from plait.schema.sync_options import KINDS

# Names that say unlike things in unlike sections.
OF_THEIR_SECTION = {
    "kind",
    "options",
    "metric",
    "batch_size",
    "every_steps",
    "seed",
    "mode",
    "name",
    "evaluate",
}
# Settings that workers receive in another form than the job: parsed, read from a file, or with options.
IN_ANOTHER_FORM = {"model", "plan", "hosts", "sync", "slow", "jitter", "topology", "elastic"}


def declared() -> dict[str, set[type[Any]]]:
    """The classes that declare each field themselves."""
    found = defaultdict(set)
    for module in (settings, placement, job_settings):
        for kind in vars(module).values():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__:
                for name in inspect.get_annotations(kind):
                    found[name].add(kind)
    return found


def test_no_key_is_declared_by_two_classes():
    twice = {name for name, kinds in declared().items() if len(kinds) > 1 and name != "_"}
    assert twice == OF_THEIR_SECTION | IN_ANOTHER_FORM


def test_the_models_of_a_job_file_have_no_key_or_default_of_their_own():
    assert not Section.model_fields
    assert not OpenSection.model_fields
    model = model_of(Job)
    assert set(model.model_fields) == {each.name for each in fields(Job)} - {"content", "folder", "taken"}
    assert {name for name, each in model.model_fields.items() if each.is_required()} == {
        "name",
        "model",
        "data",
    }
    assert all(each.default is None for each in model.model_fields.values() if not each.is_required())


@pytest.mark.parametrize(
    ("group", "holders"),
    [
        (PipelineOptions, (PlanRequest, ParallelSettings, PipelineSettings)),
        (PlanRequest, (ParallelSettings,)),
        (HostAccess, (ClusterSettings, Placement)),
        (WorkerLimits, (ParallelSettings, Placement)),
        (CommonSettings, (Job, TrainSettings)),
    ],
)
def test_classes_that_hold_the_same_keys_have_them_from_one_base(group: Any, holders: tuple[Any, ...]):
    for holder in holders:
        assert issubclass(holder, group)


MINIMAL = {"name": "t", "model": "m:m", "data": {"kind": "digits", "batch_size": 8}, "steps": 1}


def test_a_job_that_sets_nothing_has_the_defaults_of_the_settings():
    made = make_job(MINIMAL)
    assert made.parallel == ParallelSettings()
    assert made.cluster == ClusterSettings()
    assert made.placement == Placement()
    plain = TrainSettings("t", settings.ModelSettings("m:m"), settings.DataSettings("digits", 8), steps=1)
    assert made.settings() == plain


def test_what_a_job_says_arrives_in_the_settings_of_its_workers():
    changed: dict[str, Any] = {
        **MINIMAL,
        "clip_norm": 2,
        "early_stop": {"patience": 3},
        "evaluate": {"every_steps": 5},
        "optimizer": {"kind": "adamw", "lr": 0.1, "groups": [{"match": "*.bias", "weight_decay": 0.0}]},
        "parallel": {
            "plan": "auto",
            "schedule": "2bw",
            "depths": {0: 2},
            "recompute": [1, 2],
            "jitter": [0.5, 1],
            "threads": 3,
        },
        "cluster": {"hosts": ["w0:2"], "environment": {"A": "b"}, "link_timeout_s": 4},
    }
    made = make_job(changed)
    sent = made.settings()
    assert values_of(CommonSettings, made) | {"model": None} == values_of(CommonSettings, sent) | {
        "model": None
    }
    assert sent.optimizer.groups == (settings.GroupSettings("*.bias", {"weight_decay": 0.0}),)
    assert (made.parallel.schedule, sent.slow.jitter) == (Schedule.TWO_BUFFERED, (0.5, 1.0))
    assert values_of(PipelineOptions, made.parallel) == {
        "vertical_sync": False,
        "depths": {0: 2},
        "recompute": (1, 2),
    }
    assert values_of(HostAccess, made.placement) == values_of(HostAccess, made.cluster)
    assert (made.placement.threads, made.placement.workers) == (3, 2)
    assert decode(TrainSettings, encode(sent)) == sent
    assert make_job(made.content) == made


@pytest.mark.parametrize("sync", [*KINDS, "auto"])
def test_a_job_takes_every_sync_that_there_is(sync: str):
    assert make_job(MINIMAL, [f"parallel.sync={sync}"]).settings().sync.kind == sync


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_job_takes_every_schedule_that_there_is(schedule: Schedule):
    job = make_job(MINIMAL, ["parallel.plan=auto", f"parallel.schedule={schedule}"])
    assert job.parallel.schedule is schedule
