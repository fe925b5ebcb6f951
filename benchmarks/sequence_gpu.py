"""The sequence workloads on a GPU: the losses of a CPU, of two stages and of fused trials, and their speed.

    python benchmarks/sequence_gpu.py [--device cuda] [--steps 10] [--only GNMT]

Each workload trains a few steps, in float32 without TF32: in one process on the device and on the CPU; in two
stages on the same device, whose workers talk by gloo, under flush and stash; and as a sweep of four trials,
fused. Claims, by the largest relative difference of a step's loss: the device has the CPU's curve, flush
that of one process, and each fused trial its own alone; under stash the loss falls. The exit status is 1
where a claim fails. Needs the transformers library, and neither job files nor pydantic.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.api.world import choose_device
from plait.core.events import Recorded, read
from plait.core.run_events import Step, TrialStep
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import components
from plait.training.choose_engine import make_loop

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from support.plans import cut_in_two
from support.sweeping import sweep_here, sweep_of
from support.training import PlainWorker
from support.world import run_ranks

MICROBATCHES, TRIALS = 2, 4
# Of a step's loss: other kernels on another device, and the same ones in another order.
DEVICE_CLOSE, STAGES_CLOSE, FUSED_CLOSE = 2e-3, 5e-4, 2e-3
WORKLOADS = "plait.workloads"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def job(
    model: str, args: dict[str, Any], data: str, options: dict[str, Any], **changes: Any
) -> TrainSettings:
    """Batches of eight, all of them the same samples, so that the loss falls; AWD-LSTM has two in turn."""
    values: dict[str, Any] = {
        "name": "sequence",
        "model": ModelSettings(f"{WORKLOADS}.{model}", args),
        "data": DataSettings(data, 8, options),
        "loss": "cross-entropy",
        # A large epsilon keeps the rounding of gradients that are truly zero from being blown up.
        "optimizer": OptimizerSettings("adam", {"lr": 0.003, "eps": 1e-3}),
        "evaluate": EvaluateSettings(metric="none"),
        "checkpoint": CheckpointSettings(every_steps=1_000_000),
        "log_every_steps": 1,
        "verify": "off",
    }
    return TrainSettings(**{**values, **changes})


def transformers_job(architecture: str, config: dict[str, Any]) -> TrainSettings:
    lines = {"samples": 8, "length": 32, "vocabulary": 256}
    args = {"architecture": architecture, "config": {"vocab_size": 256, **config}}
    made = "text_lines:synthetic_lines"
    return job("from_transformers:from_config", args, made, lines, loss="model")


TEXT = {"shape": [32], "vocabulary": 256, "samples": 8}
BERT = {"size": "tiny", "dropout": 0.0}
JOBS = {
    "LSTM": job("lstm:lstm", {"vocabulary": 256, "width": 128, "dropout": 0.0}, "synthetic", TEXT),
    "AWD-LSTM": job(
        "language.awd_lstm:awd_lstm_tiny",
        {"vocabulary": 256, "streams": 8},
        f"{WORKLOADS}.data.continued_text:synthetic_text",
        {"streams": 8, "length": 32, "vocabulary": 256, "windows": 2},
        optimizer=OptimizerSettings("adam", {"lr": 0.05, "eps": 1e-3}),
    ),
    "transformer": job(
        "transformer:transformer",
        {"vocabulary": 256, "context": 32, "layers": 2, "heads": 4, "width": 128, "dropout": 0.0},
        "synthetic",
        TEXT,
    ),
    "GNMT": job(
        "translation.gnmt:gnmt_tiny",
        {"vocabulary": 160},
        "translation.number_words:number_words",
        {"samples": 32, "test_samples": 8, "merges": 100, "sentences": 4},
        loss=f"{WORKLOADS}.translation.loss:label_smoothing",
        loss_args={"tokens_per_sample": 30.0},
    ),
    "S2VT": job(
        "video.s2vt:s2vt_tiny",
        {"vocabulary": 32},
        "captions:synthetic_captions",
        {"samples": 8, "features": 12},
    ),
    "BERT pre-training": job(
        "bert:pretraining",
        {**BERT, "vocabulary": 256, "context": 32},
        "bert.shards:synthetic_shards",
        {"samples": 8, "vocabulary": 256},
        loss="model",
    ),
    "BERT on SQuAD": job(
        "bert:question_answering",
        {**BERT, "vocabulary": 128, "context": 48},
        "bert.squad:synthetic_squad",
        {"questions": 8, "length": 48},
        loss="model",
    ),
    "GPT-2": transformers_job(
        "GPT2LMHeadModel",
        {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "T5": transformers_job(
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
    ),
}
JOBS["AWD-LSTM"] = replace(JOBS["AWD-LSTM"], data=replace(JOBS["AWD-LSTM"].data, shuffle=False))


@dataclass(frozen=True)
class Curve:
    """The loss after each step, and steps a second, the first few left out."""

    losses: Sequence[float]
    steps_per_s: float

    def apart(self, other: Curve) -> float:
        """The largest relative difference of two losses of the same step; infinite where one is no number."""
        pairs = zip(self.losses, other.losses, strict=True)
        found = [abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs]
        return max(found)


def exact_kernels() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def train(settings: TrainSettings, folder: Path) -> None:
    """One run, in this process or on this rank of a world."""
    exact_kernels()
    worker = PlainWorker()
    # All workers share the first GPU.
    device = choose_device(settings.device, 0)
    parts = components.build(settings, device)
    make_loop(worker, settings, parts, RunDir(folder)).train(False)


def train_stages(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> None:
    for name, settings in jobs.items():
        train(settings, folder / name)
        dist.barrier()


def curve_of(folder: Path) -> Curve:
    events = [entry.event for entry in read(RunDir(folder).events(0))]
    steps = [event for event in events if isinstance(event, Step)]
    seconds = statistics.median(event.seconds for event in steps[2:])
    return Curve([math.nan if event.loss is None else event.loss for event in steps], 1 / seconds)


def train_alone(settings: TrainSettings, folder: Path) -> Curve:
    train(settings, folder)
    return curve_of(folder)


def train_fused(settings: TrainSettings, rates: Sequence[float], folder: Path) -> tuple[list[Curve], bool]:
    """The curve of each trial, and whether all were fused, module by module."""
    exact_kernels()
    sweep = sweep_of(f"optimizer.lr={','.join(map(str, rates))}", job=settings, width=len(rates))
    found = sweep_here(sweep, folder)
    entries = [entry for entry in read(RunDir(folder).events(0)) if isinstance(entry.event, TrialStep)]
    trials: list[list[Recorded]] = [[e for e in entries if e.event.trial == n] for n in range(len(rates))]
    times = [entry.t for entry in trials[0]]
    seconds = statistics.median(b - a for a, b in pairwise(times[2:]))
    curves = [Curve([float(entry.event.loss) for entry in own], 1 / seconds) for own in trials]
    return curves, all(array["fused"] for array in found["arrays"])


def check(name: str, device: str, steps: int, folder: Path) -> tuple[str, list[str]]:
    """The workload's row of the table, and which claims fail."""
    settings = replace(JOBS[name], steps=steps, device=device)
    plain = train_alone(settings, folder / "plain")
    on_cpu = train_alone(replace(settings, device="cpu"), folder / "cpu")
    pieces = train_alone(replace(settings, accumulate=MICROBATCHES), folder / "pieces")
    flush, stash = (curve_of(folder.parent / "stages" / f"{name} {kind}") for kind in ("flush", "stash"))
    rates = [settings.optimizer.options["lr"] / (1 + trial) for trial in range(TRIALS)]
    fused, is_fused = train_fused(settings, rates, folder / "sweep")
    alone = [plain]
    for trial, rate in enumerate(rates[1:], 1):
        own = replace(
            settings,
            optimizer=replace(settings.optimizer, options={**settings.optimizer.options, "lr": rate}),
        )
        alone.append(train_alone(own, folder / f"alone-{trial}"))
    by_device, by_stages = plain.apart(on_cpu), flush.apart(pieces)
    by_fusion = max(one.apart(other) for one, other in zip(fused, alone))
    claims = {
        f"{device} parts from cpu by {by_device:.1e}": by_device <= DEVICE_CLOSE,
        f"flush parts from one process by {by_stages:.1e}": by_stages <= STAGES_CLOSE,
        f"under stash the loss went from {stash.losses[0]:.4f} to {stash.losses[-1]:.4f}": falls(
            stash.losses
        ),
        f"fused trials part from each alone by {by_fusion:.1e}": by_fusion <= FUSED_CLOSE,
        "the trials were not fused": is_fused,
    }
    row = (
        f"{name:18} {on_cpu.steps_per_s:7.1f} {plain.steps_per_s:7.1f} {flush.steps_per_s:7.1f} "
        f"{stash.steps_per_s:7.1f} {TRIALS * fused[0].steps_per_s:9.1f}   {by_device:8.1e} {by_stages:8.1e} "
        f"{by_fusion:8.1e}   {stash.losses[0]:.3f} -> {stash.losses[-1]:.3f}"
    )
    return row, [claim for claim, holds in claims.items() if not holds]


def falls(losses: Sequence[float]) -> bool:
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def staged(names: Sequence[str], device: str, steps: int) -> dict[str, TrainSettings]:
    """Each workload in two stages under both schedules."""
    found = {}
    for name in names:
        settings = replace(JOBS[name], steps=steps, device=device)
        found[f"{name} flush"] = cut_in_two(settings, Schedule.FLUSH, MICROBATCHES)
        found[f"{name} stash"] = cut_in_two(settings, Schedule.STASH, 1)
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--only", choices=JOBS, action="append")
    given = options.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("sequence_gpu: torch sees no GPU here; use --device cpu", file=sys.stderr)
        return 2
    if given.steps < 5:
        print(f"sequence_gpu: --steps: found {given.steps}, expected at least 5", file=sys.stderr)
        return 2
    begin, names = time.perf_counter(), given.only or list(JOBS)
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, torch {torch.__version__}, {device_name(given.device)}; {' '.join(sys.argv)}"
    )
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        jobs = staged(names, given.device, given.steps)
        run_ranks(2, train_stages, jobs, folder / "stages", deadline_s=600.0)
        print(
            f"{'steps a second':18} {'cpu':>7} {'device':>7} {'flush':>7} {'stash':>7} {'4 trials':>9}   ",
            end="",
        )
        print("by cpu   by flush by fusing  loss under stash")
        for name in names:
            row, wrong = check(name, given.device, given.steps, folder / name)
            print(row, flush=True)
            failed += [f"{name}: {claim}" for claim in wrong]
    print(f"{time.perf_counter() - begin:.0f} s; {'all claims hold' if not failed else 'claims fail:'}")
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu, one thread a worker"


if __name__ == "__main__":
    sys.exit(main())
