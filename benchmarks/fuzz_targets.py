"""Malformed inputs for benchmarks/fuzz_inputs.py: what people type and what files hold, changed at random.

A target makes one input from a random source and a number, and returns how to show it and how Plait reads it.
Reading raises InputError for what it refuses; what it accepts is used the way the next step would.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from typer.testing import CliRunner

from fuzz_values import LONG, ODD, TOKENS, changed_text, changed_tree, words
from plait.cli import app
from plait.cli.runs import status
from plait.cli.train import placement_overrides, slow_overrides
from plait.core import events as event_files
from plait.core import run_events
from plait.core.codec import encode
from plait.core.errors import CheckpointError, InputError
from plait.graph import pipedream
from plait.jobs.evaluate import measure_run
from plait.jobs.sweep import make_sweep
from plait.launcher.run_dir import RunDir
from plait.measure.auto_plan import planned
from plait.planner import Plan, Settings, fastest_plan, machines, render_plan, save_plan
from plait.profiler.link_bandwidth import Link, Sum
from plait.profiler.profile import LayerSpread, Profile, load_profile, save_profile
from plait.profiler.timing import Timed
from plait.schema.job import Job, make_job, parse, read_job
from plait.schema.plans.graph import Edge, Graph, Node, Tie
from plait.schema.settings import PlanRequest
from plait.schema.topology_spec import AUTO, build_topology, read_topology_spec
from plait.sweeping.search.space import parse_dimension
from plait.training import checkpoint as checkpoints
from plait.training.checks.plan_settings import check_pipeline

Use = Callable[[], Any]
Target = Callable[[random.Random, Path, int], tuple[str, Use]]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "replace"))
    return path


def _json(source: random.Random, path: Path, tree: Any) -> str:
    """Write `tree` with a change of its values or its text to `path`; the change in words."""
    if source.random() < 0.8:
        what, tree = changed_tree(source, tree)
        text = "{" + "9" * 5000 + "}" if "a huge number" in what else json.dumps(tree)
    else:
        text = changed_text(source, json.dumps(tree))
        what = f"text {text[-200:]!r}"
    _write(path, text)
    return what


# Jobs

PLAIN: dict[str, Any] = {
    "name": "plain",
    "model": "plait.workloads.mlp:mlp_tiny",
    "data": {"kind": "digits", "batch_size": 64},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "steps": 20,
    "parallel": {"workers": 2},
}
FULL: dict[str, Any] = {
    **PLAIN,
    "model_args": {"classes": 10, "sizes": [8, 8]},
    "data": {"kind": "digits", "batch_size": 64, "shuffle": True, "last_batch": "keep", "loaders": 0},
    "loss": "cross-entropy",
    "loss_args": {"label_smoothing": 0.1},
    "optimizer": {"kind": "adam", "lr": 0.1, "betas": [0.9, 0.99]},
    "lr_schedule": {"kind": "cosine", "warmup_steps": 5},
    "seed": 3,
    "precision": "float32",
    "device": "cpu",
    "clip_norm": 1.0,
    "accumulate": 2,
    "evaluate": {"every_steps": 10, "metric": "auto", "batch_size": 32},
    "early_stop": {"patience": 3, "metric": "loss", "min_change": 0.0},
    "checkpoint": {"every_steps": 10, "keep_last": 2, "keep_best": "accuracy"},
    "tensorboard": False,
    "log_every_steps": 10,
    "parallel": {"topology": "ring", "slow": {1: 4.0}, "jitter": [0.1, 0.5], "threads": 1, "timeout_s": 30.0},
    "cluster": {
        "hosts": ["w0:2", "w1:2"],
        "shell": "ssh {host}",
        "nic": "eth0",
        "python": "python3",
        "link_timeout_s": 5.0,
        "environment": {"A": "b"},
    },
    "run_dir": "runs",
}
SYNCS: dict[str, dict[str, Any]] = {
    "partial-reduce": {"average": "weights", "minimum": 2, "window": 0.1, "patience": 1.0, "lease_s": 5},
    "ad-psgd": {"graph": "ring", "lease_s": 5},
    "sma": {"alpha": 0.1},
    "local-sgd": {"every": 8, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
    "hetpipe": {"servers": 1, "dedicated": False, "staleness": 0, "wave": 1},
}
STAGES = {"workers": 2, "plan": "model-parallel", "schedule": "flush", "depths": {0: 2}, "recompute": [0]}
JOBS = [
    PLAIN,
    FULL,
    *({**PLAIN, "parallel": {"workers": 4, "sync": k, "sync_options": o}} for k, o in SYNCS.items()),
    {**PLAIN, "parallel": STAGES},
]


def use_job(job: Job) -> None:
    """What a run makes of a job; written down and read again it is the same."""
    told = json.dumps([encode(job.settings()), encode(job.placement)])
    again = make_job(parse(job.text(), "again"))
    assert json.dumps([encode(again.settings()), encode(again.placement)]) == told, "another job comes back"
    assert "\0" not in job.run_dir


def job_values(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    what, tree = changed_tree(source, source.choice(JOBS))
    return what, lambda: use_job(make_job(tree))


def job_text(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    text = changed_text(source, yaml.safe_dump(source.choice(JOBS), sort_keys=False))
    path = _write(folder / "job.yaml", text)
    return repr(text[-300:]), lambda: use_job(read_job(path))


def _bomb(first: str, node: Callable[[str], str], levels: int = 9) -> str:
    """Anchors that refer to the one before nine times each."""
    lines = [f"  v0: &v0 {first}"]
    lines += [f"  v{i + 1}: &v{i + 1} {node(f'*v{i}')}" for i in range(levels)]
    return "\n".join(lines) + "\n"


def _tail(text: str) -> str:
    return yaml.safe_dump(PLAIN, sort_keys=False) + text


TAGS = [
    *(f"!!{kind} abc" for kind in words("int float bool timestamp null map seq binary omap pairs")),
    *("!!set {a}", "!!omap [b]", "!!pairs [b]", "!!str [a]", "!mine x", "!!int [a]", "2020-99-99"),
    *("2020-01-01", "!!python/object/apply:os.system ['true']"),
]
HANDMADE = {
    "lists of lists": _tail("model_args:\n" + _bomb("[x]", lambda a: f"[{', '.join([a] * 9)}]")),
    "maps of maps": _tail(
        "model_args:\n" + _bomb("{x: 1}", lambda a: "{" + ", ".join(f"k{j}: {a}" for j in range(9)) + "}")
    ),
    "lists at the top": "a:\n" + _bomb("[x]", lambda a: f"[{', '.join([a] * 9)}]"),
    "merges": "a:\n" + _bomb("{x: 1}", lambda a: "{<<: [" + ", ".join([a] * 9) + "]}", 12),
    "itself": _tail("model_args: &a {x: *a}\n"),
    "itself in a list": _tail("model_args: {x: &a [*a]}\n"),
    "deep lists": _tail("model_args: {x: " + "[" * 3000 + "]" * 3000 + "}\n"),
    "deep maps": "{a: " * 3000,
    "deep lines": "".join(" " * i + f"k{i}:\n" for i in range(400)),
    "many keys": "".join(f"key{i}: 1\n" for i in range(20000)),
    "many keys in a section": _tail("cluster:\n" + "".join(f"  key{i}: 1\n" for i in range(20000))),
    "many hosts": _tail("cluster: {hosts: [" + ", ".join(f"w{i}" for i in range(20000)) + "]}\n"),
    "long key": f"{LONG * 100}: 1\n",
    "long value": f"name: {LONG * 100}\n",
    "digits": "name: x\nsteps: " + "9" * 5000,
    "hexadecimal digits": "name: x\nsteps: 0x" + "f" * 5000,
    "nul": 'name: "\\0"\n',
    "raw nul": "name: \0\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "empty": "",
    "tabs": "\t\tname: x",
    "mark": "\ufeff" + yaml.safe_dump(PLAIN),
    "list as a key": "? [a, b]\n: 1\n",
    "map as a key": "? {a: b}\n: 1\n",
    "null as a key": "null: 3\n" + yaml.safe_dump(PLAIN),
    "numbers as keys": "1: 2\n3: 4\n",
    "given twice": yaml.safe_dump(PLAIN) + "steps: 4\n",
    "surrogates": 'name: "\\ud83d\\ude00"\n',
    "surrogate in arguments": _tail('model_args: {x: "\\ud83d"}\n'),
    "minutes": _tail("model_args: {x: 1:30}\n"),
    "topology that is called": _tail("parallel: {topology: 'os:system'}\n"),
    "topology of many": _tail("")
    .replace("workers: 2", "workers: 60000, topology: clique")
    .replace("batch_size: 64", "batch_size: 60000"),
    **{f"tag {tag}": f"name: {tag}\n" for tag in TAGS},
}


def job_handmade(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    name = list(HANDMADE)[number % len(HANDMADE)]
    path = _write(folder / "job.yaml", HANDMADE[name])
    return name, lambda: use_job(read_job(path))


KEYS = [
    *words(
        "optimizer.lr optimizer parallel.slow parallel.depths parallel.topology data name data.batch_size"
    ),
    *words("data.batch_size.x steps seed clip_norm cluster.environment model_args.x cluster.shell run_dir"),
    *("a.b.c", ".", "", "é", "early_stop.patience", "model", ".".join("a" * 2000)),
]


def set_flag(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    text = source.choice(KEYS) + source.choice(("=", "=", "=", "=", "", "==")) + source.choice(TOKENS)
    if source.random() < 0.4:
        text = changed_text(source, text)
    return repr(text[:300]), lambda: use_job(make_job(source.choice(JOBS), [text]))


HOSTS = [
    *words("w0:2,w1:2 w0 , w0:0 w0:-1 w0:1e3 w0:٣ w0:² w0:2:3 -oProxyCommand=x:1 a$(x):1 a;b:1 [::1]:2 ::1"),
    *words("user@host:2 w0,w0 é:1 localhost:2 {host}:1 *:1 'w0':1"),
    *("", "a b:1", " w0 , w1 ", "w\n0:1", "w\0:1", "w0:" + "9" * 25, "w0:" + "9" * 5000, "w," * 3000),
]


def hosts_flag(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    text = source.choice(HOSTS)
    if source.random() < 0.5:
        text = changed_text(source, text)

    def use() -> None:
        job = make_job(PLAIN, placement_overrides(None, text, None))
        use_job(job)
        for host in job.placement.hosts:
            assert not host.name.startswith("-"), "an option of ssh"
            assert "\0" not in host.name, "no process can be started with it"

    return repr(text[:300]), use


PAIRS = [
    *words("1:4 1 : 1: 0:1 1:nan nan:1 inf:2 1:inf -1:2 1.5:2 9:2 1:0.5 1e0:2 1e300:2 1:1e308 1:4:5 x:y"),
    *words("1_0:2 ٣:2 0:١ 1:4} 0.1:0.5 0:0 2:1"),
    *("", "1: 4"),
]


def slow_flags(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    def pair() -> str:
        return source.choice(PAIRS) if source.random() < 0.6 else changed_text(source, source.choice(PAIRS))

    slow = [pair() for _ in range(source.choice((0, 1, 1, 2)))]
    jitter = source.choice((None, pair()))
    return repr((slow, jitter))[:300], lambda: use_job(make_job(PLAIN, slow_overrides(slow, jitter)))


# Topologies

GRAPHS = {
    "graphs": [
        {"reduce": [[1, 0], [2, 1], [3, 2]], "broadcast": [[0, 1], [0, 2], [2, 3]]},
        {"reduce": [[0, 1], [2, 1], [3, 1]]},
    ]
}
NAMED = [
    *words("star:9 star:-1 star:x star: ring:1 tree:1e3 auto:1 default:2 native:3 : a:b os:system os:getcwd"),
    *words("sys:exit os:_exit builtins:list builtins:print builtins:exec json:loads itertools:cycle math:pi"),
    *words("star:١ x.json ..:x a..b:c builtins:dict.fromkeys plait:nothing time:sleep"),
    *("star:" + "9" * 5000, "a\0b:c", "star" * 1000),
]


def topology_file(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    path = folder / "graphs.yaml"
    if source.random() < 0.1:
        what = source.choice(list(HANDMADE))
        _write(path, HANDMADE[what].replace("model_args", "graphs"))
    elif source.random() < 0.7:
        what, tree = changed_tree(source, GRAPHS)
        _write(path, "graphs: " + "9" * 5000 if "a huge number" in what else yaml.safe_dump(tree))
    else:
        what = changed_text(source, yaml.safe_dump(GRAPHS))
        _write(path, what)
    return what, lambda: build_topology(read_topology_spec(str(path)), ["a", "a", "b", "b"])


def topology_name(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    name = NAMED[number % len(NAMED)]
    if number >= len(NAMED):
        name = changed_text(source, source.choice(("star:1", "binary-tree", "os.path:join", "graphs.json")))

    def use() -> None:
        make_job(PLAIN, [f"parallel.topology={json.dumps(name)}"])
        if (spec := read_topology_spec(name)).name != AUTO:
            build_topology(spec, ["a", "a"])

    return repr(name[:200]), use


# Graphs, profiles, plans


def _graph() -> Graph:
    """A small model with a branch and a tied parameter."""
    sizes = [(2e-3, 4e-3, 4e4, 1e5), (3e-3, 5e-3, 4e4, 0.0), (1e-3, 1e-3, 2e4, 4e5), (4e-3, 9e-3, 1e4, 9e5)]
    sizes += [(2e-3, 3e-3, 1e4, 2e4), (1e-3, 2e-3, 40.0, 4e4)]
    nodes = [Node(f"layer{i}", "Linear(9, 9)", *size, 0.0, 1e4) for i, size in enumerate(sizes)]
    pairs = [(0, 1), (1, 2), (0, 3), (2, 4), (3, 4), (4, 5)]
    edges = [Edge(f"layer{a}", f"layer{b}", sizes[a][2]) for a, b in pairs]
    return Graph(tuple(nodes), tuple(edges), (Tie(4e4, ("layer0", "layer5")),))


def _profile() -> Profile:
    graph = _graph()
    spreads = tuple(LayerSpread(node.id, 1e-5, 1e-5) for node in graph.nodes)
    links = tuple(Link(a, 1 - a, 1e9, 1e-4, True) for a in (0, 1))
    return Profile(
        "mine:net",
        graph,
        "cpu",
        "float32",
        8,
        "2",
        1,
        5,
        Timed(0.04, 0.001),
        spreads,
        (),
        links,
        (Sum(2, 2e9, 1e-4, True),),
        1e-3,
        1e-4,
    )


GRAPH_TEXT = str(pipedream.from_graph(_graph()))


def _line(number: int, *amounts: str) -> str:
    forward, backward, outputs, parameters = (*amounts, "1.0", "1.0", "4.0", "4.0")[:4]
    return (
        f"n{number} -- X -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={outputs}, parameter_size={parameters}\n"
    )


GRAPH_TEXTS = {
    "empty": "",
    "a line": "\n",
    "one": _line(1),
    "zeros": _line(1, "0", "0", "0", "0") + _line(2, "0", "0", "0", "0"),
    "huge": _line(1, *["1e308"] * 4) + _line(2, *["1e308"] * 4) + "\tn1 -- n2\n",
    "huge weights": _line(1, "1", "1", "4", "1e308") + _line(2) + "\tn1 -- n2\n",
    "overflow": _line(1, "1e999") + _line(2) + "\tn1 -- n2\n",
    "tiny": _line(1, *["1e-320"] * 4) + _line(2) + "\tn1 -- n2\n",
    "tiny and huge": _line(1, "1e-300", "0", "0", "0")
    + _line(2, "1e11", "1", "1e18", "1e18")
    + "\tn1 -- n2\n",
    "to itself": _line(1) + "\tn1 -- n1\n",
    "other digits": _line(1, "١٢"),
    "an empty list": _line(1, "1", "1", "[]"),
    "digits": _line(1, "1" * 5000),
    "stage": _line(1).rstrip("\n") + " -- stage_id=" + "9" * 5000 + "\n",
    "carriage returns": _line(1).replace("\n", "\r\n"),
    "apart": "".join(map(_line, range(22))),
    "a long name": _line(1).replace("n1", LONG) + _line(2) + f"\tn2 -- {LONG}x\n",
}


def use_graph(graph: Graph) -> None:
    render_plan(fastest_plan(graph, machines(2, 1e9), Settings()))


def graph_text(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    if number < len(GRAPH_TEXTS):
        name = list(GRAPH_TEXTS)[number]
        text = GRAPH_TEXTS[name]
    else:
        text = name = changed_text(source, GRAPH_TEXT)
    path = _write(folder / "graph.txt", text)

    def use() -> None:
        document = pipedream.read(path)
        document.stages()
        use_graph(document.graph())

    return name, use


FILES = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "digits": '{"plait": "profile", "version": ' + "9" * 5000 + "}",
    "nul": "\0" * 50,
    "empty": "",
    "no object": "[]",
    "a number": "1e999",
}


def profile_file(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    path = folder / "x.profile.json"
    if number < len(FILES):
        what = list(FILES)[number]
        _write(path, FILES[what])
    else:
        save_profile(_profile(), path)
        what = _json(source, path, json.loads(path.read_text()))
    return what, lambda: use_graph(load_profile(path).loaded_graph())


@cache
def _plan(microbatches: int | None) -> Plan:
    return fastest_plan(_graph(), machines(2, 1e9), Settings(microbatches=microbatches))


def plan_file(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    path = folder / "x.plan.json"
    if number < len(FILES):
        what = list(FILES)[number]
        _write(path, FILES[what])
    else:
        save_plan(_plan(source.choice((None, 8))), path)
        what = _json(source, path, json.loads(path.read_text()))
    job = make_job(PLAIN, ["parallel.plan=x.plan.json"])

    def use() -> None:
        settings, plan = planned(job.settings(), job.placement, PlanRequest(str(path)))
        check_pipeline(settings, 2)
        render_plan(plan)
        workers = {worker for p in range(plan.pipelines) for worker in plan.layout(p).workers}
        assert workers == {0, 1}, "workers that are not there"
        assert plan.microbatches > 0, "no microbatches"

    return what, use


AMOUNTS = [
    *words("0 -1 1 2 4 1e9 nan inf -inf 1e400 x 2x2 2x x2 0x2 99999999 1_0 ٣ 16GB 1..2GB 1e999GB . 2,2 ,"),
    *("", "1,nan", "1e-320", " 2 ", "9" * 5000, LONG),
]


def plan_flags(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    path = folder / "x.profile.json"
    save_profile(_profile(), path)
    what = ["plan", str(path), "-o", str(folder / "made.plan.json")]
    texts = ("devices", "bandwidth", "memory", "speeds", "memories", "schedule")
    for flag in source.sample(
        [*texts, "microbatches", "pipelines", "optimizer-copies"], source.choice((1, 1, 2))
    ):
        what += [f"--{flag}={source.choice(AMOUNTS)}"]
    return " ".join(what[4:])[:200], lambda: _invoke(what)


def _invoke(what: Sequence[str]) -> None:
    done = CliRunner().invoke(app, list(what))
    if isinstance(done.exception, SystemExit) and done.exit_code == InputError.exit_status:
        raise InputError(done.output[-1000:])  # of the library that reads arguments
    if done.exception is not None:
        raise done.exception


# Sweeps

OVER = [
    *words(
        "1,2 log:1e-4:1e-1:4 log:0:1:4 log:1:0 int:1:5:3 int:1:5:nan int:1:5:inf linear:0:1:-3 log:nan:1:3"
    ),
    *words(
        "linear:-inf:inf:3 log:1e-4:1e-1 [ [1,2],[3 {} , ,, nan inf,-inf null true,false 1e400 log: log:1"
    ),
    *words("log:1:2:3:4 linear:1e308:1.5e308:3 linear:-1.7e308:1.7e308:3 int:1:1e300:4 int:1.5:2 'a' a=b"),
    *words('{"a":1} " [[[[ ]]]] int:0:9007199254740993:3 log:1e-320:1:3 linear:0:1:2.5 linear:1:5:1e9'),
    *("", "[" * 2000, "1" * 5000, "1," * 3000),
]


def over_flag(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    text = source.choice(KEYS) + source.choice(("=", "=", "=", "=", "")) + OVER[number % len(OVER)]
    if source.random() < 0.3:
        text = changed_text(source, text)
    return repr(text[:300]), lambda: parse_dimension(text)


def sweep_flags(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    def one(usual: Any, *odd: Any) -> Any:
        return usual if source.random() < 0.8 else source.choice(odd)

    over = [
        f"{one('optimizer.lr', 'optimizer.weight_decay', 'seed', *KEYS)}={one('0.1,0.2', *OVER)}"
        for _ in range(source.choice((1, 1, 1, 2, 4)))
    ]
    search = one("grid", "random", "asha", "pbt", "halving", "x")
    trials = one(None if search == "grid" else 4, 0, -1, 2**40)
    options = {
        "width": one(None, 1, 0, -3, 2**40),
        "eta": one(3, 1, 0, -1, 2**40),
        "least_steps": one(None, 1, 0, 2**70),
        "replicas": one(None, 1, 0, 3, 10**9),
        "seed": one(0, -1, 2**70),
    }
    job = make_job(PLAIN)

    def use() -> None:
        settings = make_sweep(job, over, search, trials, **options)
        json.dumps(encode(settings))

    return repr((over, search, trials, options))[:300], use


# Run folders


def _run(folder: Path) -> RunDir:
    found = RunDir(folder / "run")
    _write(found.settings, json.dumps(encode(make_job(FULL).settings())))
    state: dict[str, Any] = {"state": "running", "pid": 1, "started": 1.7e9, "updated": 1.7e9}
    state["workers"] = [{"rank": r, "host": "localhost", "pid": 4000000 + r} for r in (0, 1)]
    state["progress"] = {"step": 3, "steps": 20, "loss": 0.5, "samples_per_s": 90.0, "left_s": 4.0}
    _write(found.status, json.dumps(state))
    return found


def status_file(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    run = _run(folder)
    what = _json(source, run.status, json.loads(run.status.read_text()))
    if source.random() < 0.3:
        state = source.choice(({"state": "failed"}, {}))
        _write(run.status, json.dumps({**state, "progress": source.choice(ODD[:20])}))
        _write(
            run.failure,
            changed_text(source, "Traceback\n  File x\nValueError: y\nworker 0 failed: y\nits log: z"),
        )
    as_json = source.random() < 0.3

    def use() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            status(str(run.path), folder, as_json)

    return what, use


def stop_flags(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    run = _run(folder)
    what = _json(source, run.status, json.loads(run.status.read_text()))
    verb = ["stop", str(run.path), f"--timeout={source.choice(AMOUNTS)}", f"--run-dir={folder}"]
    return f"{verb[2]} {what}", lambda: _invoke(verb)


def settings_file(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    run = _run(folder)
    what = _json(source, run.settings, json.loads(run.settings.read_text()))

    def use() -> None:
        # That there is no checkpoint means that the settings were read.
        with contextlib.suppress(CheckpointError):
            measure_run(run)

    return what, use


def _lines() -> list[str]:
    told = [
        run_events.Step(3, 0, 0.5, 0.1, 64, 0.1),
        run_events.Evaluated(3, {"loss": 0.5, "accuracy": None}, 360, 0.1),
        run_events.CheckpointSaved(3, 0.1, True),
    ]
    return [json.dumps({"t": 1.7e9, "rank": 0, "kind": each.kind(), **encode(each)}) for each in told]


EVENT_FILES = {
    "another encoding": b'{"t":1,"rank":0,"kind":"step"\xff}\n',
    "deep": b"[" * 100_000 + b"\n",
    "nul": b"\0\0\n",
    "digits": b'{"t":' + b"9" * 5000 + b',"rank":0,"kind":"step"}\n',
    "infinite rank": b'{"t":1,"rank":Infinity,"kind":"step"}\n',
    "large rank": b'{"t":1e999,"rank":1e400,"kind":"step"}\n',
    "no rank": b'{"t":NaN,"rank":NaN,"kind":"step"}\n',
}


def event_file(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    path = folder / "rank0.jsonl"
    lines = _lines()
    if number < len(EVENT_FILES):
        what = list(EVENT_FILES)[number]
        path.write_bytes(EVENT_FILES[what])
    elif source.random() < 0.6:
        at = source.randrange(len(lines))
        what, tree = changed_tree(source, json.loads(lines[at]))
        lines[at] = "9" * 5000 if "a huge number" in what else json.dumps(tree)
        _write(path, "\n".join(lines) + "\n")
    else:
        what = changed_text(source, "\n".join(lines) + "\n")
        _write(path, what)
    return what, lambda: list(event_files.read(path))


def checkpoint_state(source: random.Random, folder: Path, number: int) -> tuple[str, Use]:
    tensors = {"weight": torch.ones(2, 2)}
    progress = {"optimizer": "sgd", "epoch": 0, "position": 64, "best": None}
    path = checkpoints.save(folder / "checkpoints", checkpoints.Checkpoint(3, tensors, tensors, progress))
    what = _json(source, path / "state.json", json.loads((path / "state.json").read_text()))

    def use() -> None:
        found = checkpoints.load(path)
        checkpoints.check_optimizer(found.progress, "sgd")
        checkpoints.load_model_state(torch.nn.Linear(2, 2, bias=False), found.model)

    return what, use


# Each target with its share of the inputs.
TARGETS: dict[str, tuple[Target, int]] = {
    "job-values": (job_values, 6),
    "job-text": (job_text, 3),
    "job-handmade": (job_handmade, 1),
    "set": (set_flag, 3),
    "hosts": (hosts_flag, 1),
    "slow-jitter": (slow_flags, 1),
    "topology-file": (topology_file, 2),
    "topology-name": (topology_name, 1),
    "graph": (graph_text, 2),
    "profile": (profile_file, 3),
    "plan": (plan_file, 4),
    "plan-flags": (plan_flags, 2),
    "over": (over_flag, 2),
    "sweep": (sweep_flags, 3),
    "status": (status_file, 2),
    "stop": (stop_flags, 1),
    "settings": (settings_file, 2),
    "events": (event_file, 2),
    "checkpoint": (checkpoint_state, 2),
}
