"""`plait demo`: the tour. Everything it shows was measured while it ran."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli.train import JsonFlag, train
from plait.core.errors import InputError
from plait.core.files import write_atomic
from plait.core.names import has_extra
from plait.core.units import show_seconds

DIGITS = """\
name: demo
model: plait.workloads.resnet:resnet18_tiny
model_args: {classes: 10, channels: 1}
data: {kind: digits, batch_size: 64}
optimizer: {kind: sgd, lr: 0.05, momentum: 0.9, weight_decay: 5.0e-4}
lr_schedule: {kind: cosine, warmup_steps: 20}
epochs: 4
evaluate: {every_steps: 40}
checkpoint: {every_steps: 100, keep_best: accuracy}
parallel: {workers: 2}
"""
RATES = "optimizer.lr=log:1e-3:1:8"


def demo(
    run_dir: Annotated[Path, typer.Option(help="Where the tour's files go.")] = Path("runs"),
    json_: JsonFlag = False,
) -> None:
    """Take the tour on this machine: measure a model, plan it, train it on real data, and sweep it.

    Example: plait demo
    """
    from plait.cli.planning import plan, profile
    from plait.cli.sweep import sweep

    started = time.monotonic()
    job, measured = run_dir / "demo.yaml", run_dir / "demo.profile.json"
    picture = run_dir / "demo.png" if has_extra("matplotlib") else None
    text = f"{DIGITS}run_dir: {run_dir}\n"
    if not job.exists():
        write_atomic(job, text)
    elif job.read_bytes() != text.encode():
        raise InputError(f"{job}: exists already and is another file; choose another folder with --run-dir")
    steps: dict[str, tuple[str, str, Callable[..., None]]] = {
        "profile": (
            "Measure it, layer by layer",
            f"plait profile {job} --batch 16 -o {measured}",
            partial(profile, job, output=measured, batch=16),
        ),
        "plan": (
            "Plan it for two devices",
            f"plait plan {measured} --devices 2{f' --timeline {picture}' if picture else ''}",
            partial(plan, measured, devices="2", timeline=picture),
        ),
        "train": ("Train it over two workers", f"plait train {job}", partial(train, job)),
        "sweep": (
            "Try eight learning rates, four at a time in one fused module on each worker",
            f"plait sweep {job} --over {RATES} --set epochs=1 --width 4",
            partial(sweep, job, over=[RATES], set_=["epochs=1"], width=4),
        ),
    }
    if json_:
        results = {name: _json_of(partial(verb, json_=True)) for name, (_, _, verb) in steps.items()}
        print(json.dumps({**results, "seconds": time.monotonic() - started}))
        return
    print("Plait takes a small ResNet and scikit-learn's 1,797 handwritten digits. The job file:\n")
    print("    " + DIGITS.replace("\n", "\n    ").rstrip())
    for what, command, verb in steps.values():
        print(f"\n{what}:\n$ {command}", flush=True)
        verb()
    print(f"\nThe tour took {show_seconds(time.monotonic() - started)}; all of it was measured just now.")
    pictures = f"{picture} and " if picture else ""
    print(f"Look at {pictures}the newest {run_dir}/demo-* (events, logs, checkpoints); change something:")
    print(f"  plait train {job} -np 1 --set optimizer.lr=0.1")


def _json_of(verb: Callable[[], None]) -> Any:
    """The JSON object that a verb prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        verb()
    return json.loads(printed.getvalue())
