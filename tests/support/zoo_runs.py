"""Jobs of a few models of the zoo, with data of their own.

Dropout is off: pipelines, sweeps and one process draw other random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.jobs.sweep import sweep
from plait.jobs.train import train
from plait.planner.schedules.in_flight import Schedule
from plait.schema.job import make_job
from plait.schema.settings import TrainSettings
from support.hard_models import CountsCalls, Divided
from support.plans import cut_in_two
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import largest_difference, saved_weights, train_each, train_here
from support.world import run_ranks
from zoo_models.transformers_models import maker

SAMPLES, STEPS, BATCH, MICROBATCHES = 24, 4, 8, 2
RATES = (0.02, 0.05, 0.1)


def gpt2() -> nn.Module:
    return maker("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)()


def bert() -> nn.Module:
    return maker("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)()


def t5() -> nn.Module:
    return maker("t5", dropout_rate=0.0)()


def stateful() -> nn.Module:
    return Divided()


def counting() -> nn.Module:
    return CountsCalls()


class Texts:
    """Dicts of a model's arguments: tokens, and as labels the same tokens or a class."""

    def __init__(self, split: str, classes: int = 0) -> None:
        tokens = torch.randint(3, 99, (SAMPLES, 10), generator=_generator(split))
        self._tokens, self._labels = tokens, tokens.sum(1) % classes if classes else tokens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self._tokens[index],
            "attention_mask": torch.ones(10, dtype=torch.long),
            "labels": self._labels[index],
        }


class Pairs:
    """Inputs of a shape, and a class."""

    def __init__(self, split: str, shape: list[int], classes: int) -> None:
        self._inputs = torch.randn(SAMPLES, *shape, generator=_generator(split))
        self._classes = torch.arange(SAMPLES) % classes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._classes[index]


def _generator(split: str) -> torch.Generator:
    return torch.Generator().manual_seed(len(split))


def _job(model: str, data: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "zoo",
        "model": model,
        "data": {"batch_size": BATCH, **data},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "steps": STEPS,
        "precision": "float64",
        "device": "cpu",
        **changes,
    }


def _own(name: str, kind: str, **data: Any) -> dict[str, Any]:
    loss = {"loss": "model"} if kind == "Texts" else {}
    return _job(f"support.zoo_runs:{name}", {"kind": f"support.zoo_runs:{kind}", **data}, **loss)


# A decoder, an encoder and an encoder-decoder of transformers that compute their own loss from dicts, an
# image model, one with Python state inside one block, and one that is refused in stages.
JOBS: dict[str, dict[str, Any]] = {
    "gpt2": _own("gpt2", "Texts"),
    "bert": _own("bert", "Texts", classes=3),
    "t5": _own("t5", "Texts"),
    "resnet18": _job(
        "plait.workloads.resnet:resnet18_tiny",
        {"kind": "support.zoo_runs:Pairs", "shape": [1, 16, 16], "classes": 10},
    ),
    "divided block": _own("stateful", "Pairs", shape=[4], classes=2),
    "counter": _own("counting", "Pairs", shape=[4], classes=2),
}


def settings_of(name: str, **changes: Any) -> TrainSettings:
    return make_job({**JOBS[name], **changes}).settings()


def plain_run(name: str, folder: Path) -> dict[str, Tensor]:
    """The weights that one process comes to, with as many microbatches as the pipeline has."""
    return train_here(settings_of(name, accumulate=MICROBATCHES), folder)[1]


def run_in_stages(name: str, folder: Path) -> float:
    """How far the weights of a run on two ranks of a test world are from those of one process."""
    settings = cut_in_two(settings_of(name), Schedule.FLUSH, MICROBATCHES)
    run_ranks(2, train_each, {"stages": settings}, folder)
    return largest_difference(saved_weights(folder / "stages"), plain_run(name, folder / "plain"))


def sweep_apart(name: str, folder: Path) -> float:
    """How far the test losses of three fused trials are from those of the trials alone."""
    settings = sweep_of(f"optimizer.lr={','.join(map(str, RATES))}", job=settings_of(name), width=3)
    return apart_from_alone(name, sweep_here(settings, folder / "sweep")["trials"], folder)


def apart_from_alone(name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> float:
    """The largest difference of the trials' test losses from those of `plait train` in one process."""
    settings = sweep_of("optimizer.lr=0.1", job=settings_of(name))
    alone = [trial_alone(settings, row["values"], folder / f"alone-{row['trial']}")[0] for row in rows]
    return max(abs(row["metrics"]["loss"] - one.test["loss"]) for row, one in zip(rows, alone))


# Real launches: processes of their own, a plan that is measured.


def launched_in_stages(name: str, folder: Path, schedule: str) -> float:
    """The same of a job that is launched on two workers, under a plan made by measuring it."""
    parallel = {"workers": 2, "plan": "model-parallel", "schedule": schedule}
    parallel |= {"microbatches": MICROBATCHES} if schedule == "flush" else {}
    result = train({**JOBS[name], "run_dir": str(folder / schedule), "parallel": parallel})
    return largest_difference(saved_weights(Path(result.run)), plain_run(name, folder / "plain"))


def launched_sweep(name: str, folder: Path) -> float:
    """The same of a sweep that is launched, its three trials fused."""
    job = {**JOBS[name], "run_dir": str(folder / "sweep")}
    return apart_from_alone(
        name, sweep(job, {"optimizer.lr": list(RATES)}, width=3).to_dict()["trials"], folder
    )
