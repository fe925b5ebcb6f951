"""`plait demo`: the tour. Everything it shows was measured while it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.runtime.folder import RunFolder

DIGITS = """\
name: demo
model: plait.workloads.resnet:resnet18_tiny
model_args: {classes: 10, channels: 1}
data: {kind: digits, batch_size: 64}
optimizer: {kind: sgd, lr: 0.05, momentum: 0.9, weight_decay: 5.0e-4}
lr_schedule: {kind: cosine, warmup_steps: 20}
epochs: 8
evaluate: {every_steps: 40}
checkpoint: {every_steps: 100, keep_best: accuracy}
parallel: {workers: 2}
"""


def demo(
    run_dir: Annotated[Path, typer.Option(help="Where the run folder goes.")] = Path("runs"),
) -> None:
    """Take the tour: train a real model on real data over two workers, on this machine.

    Example: plait demo
    """
    from plait.cli.train import run_job, show_result
    from plait.config import make_job, parse

    job = make_job(parse(DIGITS, "demo"), [f"run_dir={run_dir}"])
    print("Plait trains a small ResNet on scikit-learn's 1,797 handwritten digits with two workers.")
    print("The job file:\n")
    print("    " + DIGITS.replace("\n", "\n    ").rstrip() + "\n")
    result = run_job(job)
    show_result(result)
    folder = RunFolder(Path(result["run"]))
    print(
        f"\nIn {folder.path}: job.yaml, the events in events/, each worker's output in logs/, checkpoints/."
    )
    print(f"Change something and run it yourself: plait train {folder.job} -np 1 --set optimizer.lr=0.1")
