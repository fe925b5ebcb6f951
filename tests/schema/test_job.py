"""Job files: what is right is read as meant; a mistake is answered with path, found, expected, nearest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.core.errors import InputError, JobError
from plait.schema.hosts import LOCAL, Host
from plait.schema.job import as_job, make_job, parse, read_job

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
    assert job.placement.hosts == (Host("w0", 2), Host("w1", 2))


def test_overrides_replace_values_of_the_file():
    overrides = ["optimizer.lr=1e-3", "data.batch_size=16", "evaluate.every_steps=5", "name=other"]
    job = make_job(GOOD, overrides)
    assert job.settings().optimizer.options == {"lr": 0.001}
    assert (job.data.batch_size, job.evaluate.every_steps, job.name) == (16, 5, "other")
    assert GOOD["data"]["batch_size"] == 8


def test_a_job_written_down_again_is_the_same_job():
    job = make_job(GOOD, ["optimizer.lr=1e-3", "parallel.workers=2"])
    again = make_job(parse(job.text(), "again"))
    assert (again.settings(), again.placement) == (job.settings(), job.placement)


def test_how_long_a_job_takes_is_said_by_the_override_whichever_key_the_file_has():
    steps = {**{k: v for k, v in GOOD.items() if k != "epochs"}, "steps": 5}
    job = make_job(steps, ["epochs=2"])
    assert (job.epochs, job.steps) == (2, None)
    assert "steps" not in job.content
    assert make_job(GOOD, [("steps", 7)]).settings().epochs is None
    with pytest.raises(JobError, match="epochs: 2 and steps: 3, expected one"):
        make_job(GOOD, ["epochs=2", "steps=3"])
    with pytest.raises(JobError, match="found neither"):
        make_job(GOOD, ["epochs=null"])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("device=gpu", "cuda"),
        ("device=GPU", "cuda"),
        ("precision=bfloat16", "bf16"),
        ("precision=float16", "fp16"),
        ("precision=half", "fp16"),
        ("precision=fp32", "float32"),
        ("precision=double", "float64"),
    ],
)
def test_devices_and_precisions_have_the_names_that_torch_gives_them(written: str, meant: str):
    assert getattr(make_job(GOOD, [written]), written.partition("=")[0]) == meant


def test_a_python_file_is_no_job_and_says_how_to_name_its_code(tmp_path: Path):
    (tmp_path / "train.py").write_text("import torch\nprint('hello')\n")
    with pytest.raises(JobError, match=r"train\.py: a Python file, expected a job file.*model: train:Net"):
        read_job(tmp_path / "train.py")
    (tmp_path / "job.txt").write_text("just some words\n")
    with pytest.raises(JobError, match=r"job\.txt: found 'just some words', expected keys such as name"):
        read_job(tmp_path / "job.txt")


def test_without_hosts_the_workers_run_on_localhost():
    assert make_job(GOOD, ["parallel.workers=3"]).placement.hosts == (Host(LOCAL, 3),)


def test_one_chain_of_stages_may_have_more_workers_than_a_batch_has_samples():
    chain = ["data.batch_size=1", "parallel.workers=2", "parallel.plan=model-parallel"]
    assert make_job(GOOD, chain).data.batch_size == 1


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
    ("parallel.control=here", "parallel.control: found 'here', expected host:port, such as 127.0.0.1:0"),
    ("clip_norm=-1", "clip_norm: found -1, expected greater than 0"),
    ("epochs=null", "epochs: found neither, expected one of epochs and steps"),
    ("epochs=null", "epochs: found neither, expected one of epochs and steps"),
    ("parallel.workers=9", "data.batch_size: found 8 for 9 workers; expected at least one sample a worker"),
    ("early_stop.patience=2", "early_stop: needs evaluations; add evaluate.every_steps"),
    ("cluster.hosts=['w0:x']", "cluster.hosts: found 'w0:x', expected 'host' or 'host:workers'"),
    ("model.x=1", "--set model.x: 'model' is 'plait.workloads.mlp:mlp_tiny', so it has no key 'x'"),
    ("lr", "--set: found 'lr', expected key.path=value"),
    ("seed=[", "--set seed: found '[', expected a YAML value"),
    (
        "seed=!!int q",
        "--set seed: found '!!int q', expected a YAML value (found 'q', expected a whole number)",
    ),
    ("a..b=1", "--set: found 'a..b', expected a key of the job"),
    (".".join("a" * 2000) + "=1", "found 2,000 levels, expected a key of the job"),
    ("epochs=1:30", "epochs: found '1:30', expected a valid integer"),
    ("data.shuffle=no", "data.shuffle: found 'no', expected a valid boolean"),
    ("optimizer.lr=.nan", "optimizer.lr: found nan, expected a finite number"),
    ("optimizer.betas=[0.9, .inf]", "optimizer.betas.1: found inf, expected a finite number"),
    ("lr_schedule.gamma=-.inf", "lr_schedule.gamma: found -inf, expected a finite number"),
    ("clip_norm=.inf", "clip_norm: found inf, expected a finite number"),
    ("parallel.timeout_s=.inf", "parallel.timeout_s: found inf, expected a finite number"),
    ("parallel.timeout_s=1e300", "parallel.timeout_s: found 1e+300, expected less than or equal to 1000000"),
    ("cluster.link_timeout_s=.nan", "cluster.link_timeout_s: found nan, expected a finite number"),
    ("epochs=9223372036854775808", "epochs: found 9223372036854775808, expected less than or equal to"),
    ("checkpoint.every_steps=9007199254740993", "expected less than or equal to 9007199254740992"),
    ("seed=18446744073709551616", "seed: found 18446744073709551616, expected less than 9223372036854775808"),
    (
        "parallel.threads=2147483648",
        "parallel.threads: found 2147483648, expected less than or equal to 4096",
    ),
    ("parallel.workers=1000000", "parallel.workers: found 1000000, expected less than or equal to 65536"),
    ("data.loaders=100000", "data.loaders: found 100000, expected less than or equal to 1024"),
    ('run_dir="a\\0b"', "run_dir: found 'a\\x00b', expected text without NUL characters"),
    ("run_dir=''", "run_dir: found '', expected at least 1 character"),
    ('cluster.hosts=["w\\0:1"]', "cluster.hosts.0: found 'w\\x00:1', expected text without NUL characters"),
    ("cluster.hosts=['-oProxyCommand=x:1']", "expected a host's name or address"),
    ("cluster.environment={A=B: x}", "expected names of variables, without '='"),
    ('cluster.environment={A: "x\\0"}', "cluster.environment.A: found 'x\\x00', expected text without NUL"),
    ("parallel.slow={0: .nan}", "parallel.slow.0: found nan, expected a finite number"),
    ("parallel.jitter=[0.1, 1e300]", "parallel.jitter: found [0.1, 1e+300], expected a probability"),
    (
        "parallel={plan: auto, depths: {0: 0}}",
        "parallel.depths.0: found 0, expected greater than or equal to 1",
    ),
    (
        "parallel={plan: auto, recompute: [-1]}",
        "parallel.recompute.0: found -1, expected greater than or equal",
    ),
    ("parallel={sync: sma, sync_options: {alpha: .nan}}", "parallel.sync_options.alpha: found nan, expected"),
    ("parallel.topology=default:2", "parallel.topology: found 'default:2'; default has no root to choose"),
    ("name=" + "a" * 300, "name: found 'aaaa"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[m[0][:40] for m in MISTAKES])
def test_a_mistake_is_reported_with_the_key_and_what_was_expected(override: str, message: str):
    with pytest.raises(InputError) as caught:
        make_job(GOOD, [override])
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_all_mistakes_of_a_file_are_reported_at_once():
    with pytest.raises(JobError) as caught:
        make_job({"nam": "t", "data": {"kind": "digits"}})
    assert str(caught.value).splitlines() == [
        "nam: unknown key; did you mean 'name'?",
        "model: missing; expected text",
        "data.batch_size: missing; expected a whole number",
    ]


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        (
            {"name": "t", "model": "m:m", "data": {"kind": "digits", "batch_sise": 64}, "epochs": 1},
            ["data.batch_sise: unknown key; did you mean 'batch_size'?"],
        ),
        (
            {"name": "t", "modle": "m:m", "dta": {"kind": "digits", "batch_size": 64}, "epochs": 1},
            ["modle: unknown key; did you mean 'model'?", "dta: unknown key; did you mean 'data'?"],
        ),
        (
            {"name": "t", "model": "m:m", "dataset": {"type": "digits", "batch": 64}, "epochs": 1},
            ["dataset: unknown key; did you mean 'data'?"],
        ),
        (
            {"name": "t", "model": "m:m", "data": {"type": "digits", "batch": 64}, "epochs": 1},
            [
                "data.type: unknown key; did you mean 'kind'?",
                "data.batch: unknown key; did you mean 'batch_size'?",
            ],
        ),
        (
            {**GOOD, "early_stop": {"patiense": 3}},
            ["early_stop.patiense: unknown key; did you mean 'patience'?"],
        ),
        (
            # An option of some kind of data, which is only a little like the key that is missing.
            {**GOOD, "data": {"kind": "image-folder", "size": 32}},
            ["data.batch_size: missing; expected a whole number"],
        ),
        (
            {**GOOD, "batch_size": 3, "workers": 2, "weight_decay": 0.1},
            [
                "batch_size: unknown key; did you mean 'data.batch_size'?",
                "workers: unknown key; did you mean 'parallel.workers'?",
                "weight_decay: unknown key; did you mean 'optimizer.weight_decay'?",
            ],
        ),
        (
            {**GOOD, "num_epochs": 3, "learning_rate": 0.1},
            [
                "num_epochs: unknown key; did you mean 'epochs'?",
                "learning_rate: unknown key; did you mean 'optimizer.lr'?",
            ],
        ),
    ],
)
def test_a_misspelt_key_is_reported_once(content: dict[str, Any], messages: list[str]):
    with pytest.raises(JobError) as caught:
        make_job(content)
    assert str(caught.value).splitlines() == messages


def test_very_many_mistakes_make_one_short_message():
    with pytest.raises(JobError) as caught:
        make_job({**GOOD, **{f"key{i}": "x" * 100 for i in range(20_000)}, "k" * 10**5: 1})
    assert len(str(caught.value)) <= 2000
    assert str(caught.value).endswith(" more mistakes")


def test_values_of_a_job_made_in_python_must_be_plain():
    assert make_job({**GOOD, "model_args": {"path": Path("a/b"), "sizes": (1, 2)}}).model_args == {
        "path": "a/b",
        "sizes": [1, 2],
    }
    text = make_job({**GOOD, "model_args": {"x": np.float64(0.5)}}).text()
    assert make_job(parse(text, "again")).model_args == {"x": 0.5}
    shared: Any = {}
    for _ in range(30):
        shared = {"a": shared, "b": shared}
    for value, words in (
        ({1.5: 2}, "model_args: found the key 1.5, expected text"),
        ({"x": object()}, "model_args.x: found <object object"),
        ({"x": 10**200}, "model_args.x: found a whole number of 201 digits"),
        ({"x": "\ud800"}, "model_args.x: found '\\ud800', which is no text in Unicode"),
        (shared, "found too many values"),
    ):
        with pytest.raises(JobError) as caught:
            make_job({**GOOD, "model_args": value})
        assert words in str(caught.value)
        assert len(str(caught.value)) < 1000
    with pytest.raises(JobError, match=r"found 'job.yaml', expected keys .* see read_job"):
        make_job("job.yaml")  # type: ignore[arg-type]


def test_text_that_looks_like_a_number_stays_text():
    written = {"a": "1e3", "b": "010", "c": "1:30", "d": "yes", "e": "2020-01-01", "f": "0o7", "g": "a\0b"}
    job = make_job({**GOOD, "model_args": written})
    assert make_job(parse(job.text(), "again")).model_args == written


def test_a_job_is_read_from_a_path_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "job.yaml").write_text(make_job(GOOD).text())
    monkeypatch.chdir(tmp_path)
    assert read_job("job.yaml", ["epochs=3"]) == read_job(Path("job.yaml"), [("epochs", 3)])
    assert as_job("job.yaml") == as_job(GOOD) == as_job(make_job(GOOD))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "job.yaml:1: not YAML"),
        ("name: a\nsteps: !!int x\n", "job.yaml:2: found 'x', expected a whole number"),
        ("name: " + "[" * 100, "job.yaml:1: nested too deeply"),
        ("name: &a [" + "1, " * 300 + "]\nx: &b [" + "*a, " * 300 + "]\n", "too many values"),
        ("x" * 2_000_000, "larger than 1 MB"),
        ("name: a\nname: b\n", "name: given twice"),
        ('name: "\\ud83d"', "name: found '\\ud83d', which is no text in Unicode"),
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


def test_groups_of_the_optimizer_are_read_and_mistakes_in_them_are_reported():
    groups = [{"match": "*.bias|*norm*", "weight_decay": 0.0}]
    job = {
        "name": "a",
        "model": "m:m",
        "data": {"kind": "digits", "batch_size": 4},
        "steps": 1,
        "optimizer": {"kind": "adamw", "lr": 0.1, "groups": groups},
    }
    found = make_job(job).settings().optimizer
    assert [(group.match, group.options) for group in found.groups] == [
        ("*.bias|*norm*", {"weight_decay": 0.0})
    ]
    assert found.options == {"lr": 0.1}
    with pytest.raises(JobError, match=r"optimizer\.groups.*match"):
        make_job({**job, "optimizer": {"groups": [{"weight_decay": 0.0}]}})


@pytest.mark.parametrize(
    ("overrides", "read"),
    [
        (["data.num_workers=2"], lambda job: job.data.loaders == 2),
        (["data.drop_last=true"], lambda job: job.data.last_batch == "drop"),
        (["data.drop_last=false"], lambda job: job.data.last_batch == "keep"),
        (["max_grad_norm=1.5"], lambda job: job.clip_norm == 1.5),
        (["optimizer.ema=0.9"], lambda job: job.optimizer.ema.decay == 0.9),
        (["gradient_accumulation_steps=4"], lambda job: job.accumulate == 4),
        (["parallel={workers: 2, plan: auto, schedule: 1F1B}"], lambda job: job.parallel.schedule == "flush"),
        (["parallel.plan=auto", "parallel.schedule=1f1b"], lambda job: job.parallel.schedule == "flush"),
        (["data.num_workers=1", "data.loaders=3"], lambda job: job.data.loaders == 3),
        (["data.loaders=1", "data.num_workers=3"], lambda job: job.data.loaders == 3),
    ],
)
def test_an_alias_of_a_key_sets_the_key(overrides: list[str], read: Any):
    job = make_job(GOOD, overrides)
    assert read(job)
    assert read(make_job(parse(job.text(), "again")))


def test_a_key_and_its_alias_must_have_equal_values():
    data = {**GOOD["data"], "loaders": 2, "num_workers": 2, "drop_last": True}
    assert make_job({**GOOD, "data": data}).settings().data.options == {}
    with pytest.raises(JobError) as caught:
        make_job({**GOOD, "data": {**data, "last_batch": "keep"}})
    assert str(caught.value) == (
        "data.last_batch: found 'keep' and data.drop_last: True, which are two names of "
        "one key; expected one of them"
    )
    with pytest.raises(JobError, match=r"max_grad_norm: found 2\.0 and clip_norm: 1, which are two names"):
        make_job({**GOOD, "clip_norm": 1, "max_grad_norm": 2.0})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.num_workers=-1", "data.num_workers: found -1, expected greater than or equal to 0"),
        ("data.drop_last=drop", "data.drop_last: found 'drop', expected true or false"),
        ("max_grad_norm=0", "max_grad_norm: found 0, expected greater than 0"),
        ("max_grad_nrm=1", "max_grad_nrm: unknown key; did you mean 'max_grad_norm'?"),
        ("drop_last=true", "drop_last: unknown key; did you mean 'data.drop_last'?"),
        (
            "parallel.schedule=1f1",
            "expected stash or 2bw or flush or gpipe or interleaved or zero-bubble or none",
        ),
        ("parallel.schedule=1f1", "; did you mean '1f1b'?"),
    ],
)
def test_mistakes_name_a_key_as_it_was_written(override: str, message: str):
    with pytest.raises(JobError) as caught:
        make_job(GOOD, [override])
    assert message in str(caught.value)
