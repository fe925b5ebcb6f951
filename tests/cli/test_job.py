"""Job files: what is right is read as meant; a mistake is answered with path, found, expected, nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.cluster.hosts import LOCAL, Host
from plait.config import make_job, parse, read_job
from plait.core.errors import InputError, JobError

GOOD: dict[str, Any] = {
    "name": "t",
    "model": "plait.workloads.mlp:mlp_tiny",
    "data": {"kind": "digits", "batch_size": 8},
    "epochs": 1,
}

DESIGN = """
name: vgg16-on-four
model: plait.workloads.vgg:vgg16          # any importable factory; a user's own module works the same
model_args: {classes: 1000}
data: {kind: image-folder, path: data/imagenet, batch_size: 64}
loss: cross-entropy
optimizer: {kind: sgd, lr: 0.01, momentum: 0.9, weight_decay: 5e-4}
lr_schedule: {kind: polynomial, warmup_steps: 500}
epochs: 60
parallel: {workers: 4, sync: all-reduce, topology: native}
cluster: {hosts: ["w0:2", "w1:2"]}
run_dir: runs
"""


def test_the_job_of_the_design_is_read_as_meant():
    job = make_job(parse(DESIGN, "job.yaml"))
    settings = job.settings()
    assert settings.data.options == {"path": "data/imagenet"}
    assert settings.optimizer.options == {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
    assert settings.lr_schedule.warmup_steps == 500
    assert job.placement().hosts == (Host("w0", 2), Host("w1", 2))


def test_overrides_are_put_over_the_file():
    overrides = ["optimizer.lr=1e-3", "data.batch_size=16", "evaluate.every_steps=5", "name=other"]
    job = make_job(GOOD, overrides)
    assert job.settings().optimizer.options == {"lr": 0.001}
    assert (job.data.batch_size, job.evaluate.every_steps, job.name) == (16, 5, "other")
    assert GOOD["data"]["batch_size"] == 8


def test_a_job_written_down_again_is_the_same_job():
    job = make_job(GOOD, ["optimizer.lr=1e-3", "parallel.workers=2"])
    again = make_job(parse(job.text(), "again"))
    assert (again.settings(), again.placement()) == (job.settings(), job.placement())


def test_without_hosts_the_workers_are_here():
    assert make_job(GOOD, ["parallel.workers=3"]).placement().hosts == (Host(LOCAL, 3),)


MISTAKES = [
    ("optimzer={}", "optimzer: unknown key; did you mean 'optimizer'?"),
    ("checkpoint.every=3", "checkpoint.every: unknown key; did you mean 'every_steps'?"),
    ("data=null", "data: found None, expected a valid dictionary or instance of Data"),
    ("data.batch_size=0", "data.batch_size: found 0, expected greater than or equal to 1"),
    ("data.batch_size=many", "data.batch_size: found 'many', expected a valid integer"),
    ("data.batch_size=true", "data.batch_size: found True, expected a valid integer"),
    ("data.last_batch=kep", "data.last_batch: found 'kep', expected keep or drop; did you mean 'keep'?"),
    (
        "precision=bf61",
        "precision: found 'bf61', expected float32 or float64 or bf16 or fp16; did you mean 'bf16'?",
    ),
    ("parallel.sync=allreduce", "did you mean 'all-reduce'?"),
    ("name=a b", "name: found 'a b', expected letters, digits, '.', '_' and '-'"),
    ("cluster.shell=ssh {hots}", "cluster.shell: found 'ssh {hots}', expected a command with {host} in it"),
    ("clip_norm=-1", "clip_norm: found -1, expected greater than 0"),
    ("epochs=null", "epochs: found neither, expected one of epochs and steps"),
    ("steps=5", "epochs: found epochs: 1 and steps: 5, expected one of epochs and steps"),
    ("parallel.workers=9", "data.batch_size: found 8 for 9 workers; expected at least one sample a worker"),
    ("early_stop.patience=2", "early_stop: needs evaluations to judge by; add evaluate.every_steps"),
    ("cluster.hosts=['w0:x']", "cluster.hosts: found 'w0:x', expected 'host' or 'host:workers'"),
    ("model.x=1", "--set model.x: 'model' holds 'plait.workloads.mlp:mlp_tiny', so it has no key 'x'"),
    ("lr", "--set: found 'lr', expected key.path=value"),
    ("seed=[", "--set seed: found '[', expected a YAML value"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_answered(override: str, message: str):
    with pytest.raises(InputError) as caught:
        make_job(GOOD, [override])
    assert message in str(caught.value)


def test_all_mistakes_of_a_file_are_told_at_once():
    with pytest.raises(JobError) as caught:
        make_job({"nam": "t", "data": {"kind": "digits"}})
    assert str(caught.value).splitlines() == [
        "name: missing; expected text",
        "model: missing; expected text",
        "data.batch_size: missing; expected a whole number",
        "nam: unknown key; did you mean 'name'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "job.yaml:1: not YAML"),
        ("name: a\nname: b\n", "name: given twice"),
        ("- 1", "found a list, expected keys such as name, model and data"),
        ("", "found nothing, expected keys"),
    ],
)
def test_a_file_that_is_no_job_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        read_job(path)
    assert message in str(caught.value)
    with pytest.raises(JobError, match="no such file"):
        read_job(tmp_path / "none.yaml")
