"""Running statistics of replicas that saw unlike numbers of samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.data.loader import to_device
from plait.data.sampler import Position, batches
from plait.pipeline.microbatches import cut_step
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import CheckpointSettings, DataSettings, ModelSettings, TrainSettings
from plait.training import components
from support.plans import unverified_plan
from support.training import largest_difference, saved_weights, train_each, train_rank, unverified_job
from support.world import run_ranks

NORM = ModelSettings("support.training:norm_net")
CUMULATIVE = ModelSettings("test_running_statistics:cumulative_net")


class Centred(nn.Module):
    """Takes away the mean over all batches, however many there were; kept without reading a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches.add_(1)
            self.mean.add_((x.detach().mean(0) - self.mean) / self.batches)
        return x - self.mean


def cumulative_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Centred(8), nn.ReLU(), nn.Linear(8, 10))


def statistics_of_replicas(settings: TrainSettings, replicas: int) -> dict[str, torch.Tensor]:
    """Those of the first step's microbatches, dealt to copies of the model, weighted by their samples."""
    parts = components.build(settings, torch.device("cpu"))
    size = settings.data.batch_size
    batch = next(batches(Position(), len(parts.train_set), size, seed=0, shuffle=True, keep_last=True))
    pieces = cut_step(0, batch, 3, size)
    found = {"running_mean": torch.zeros(4), "running_var": torch.zeros(4)}
    for replica in range(replicas):
        model = components.build(settings, torch.device("cpu")).model
        own = pieces[replica::replicas]
        for piece in own:
            content = parts.train_set.batch(0, tuple(piece.samples), 0)
            model(to_device(content, parts.device, torch.float64)[0])
        share = sum(len(piece.samples) for piece in own) / size
        for name in found:
            found[name] = found[name] + share * model.state_dict()[f"1.{name}"]
    return found


def test_replicas_of_a_stage_weight_their_running_statistics_by_the_samples_they_saw(tmp_path: Path) -> None:
    """One of two replicas has two of the three microbatches; data-parallel shares have 10 and 11 samples."""
    data = DataSettings("digits", 21)
    jobs = {
        "stage": unverified_plan((2, 1), Schedule.FLUSH, 3, model=NORM, data=data, steps=1),
        "shares": unverified_job(model=NORM, data=data, steps=1),
        "alone": unverified_job(model=NORM, data=data, steps=1),
    }
    run_ranks(3, train_rank, jobs["stage"], tmp_path / "stage")
    run_ranks(2, train_each, {"shares": jobs["shares"]}, tmp_path)
    run_ranks(1, train_each, {"alone": jobs["alone"]}, tmp_path)
    found = saved_weights(tmp_path / "stage")
    for name, value in statistics_of_replicas(unverified_job(model=NORM, data=data), 2).items():
        assert found[f"1.{name}"].tolist() == pytest.approx(value.tolist(), rel=1e-9), name
    assert int(found["1.num_batches_tracked"]) == 2
    # The mean of the shares' means, weighted so, is the mean of the batch.
    shares, alone = (saved_weights(tmp_path / name)["1.running_mean"] for name in ("shares", "alone"))
    assert shares.tolist() == pytest.approx(alone.tolist(), rel=1e-9)


def in_two_runs(rank: int, settings: TrainSettings, folder: Path) -> None:
    """The same steps at once, and with an end and a resume between them."""
    train_rank(rank, settings, folder / "at once")
    train_rank(rank, replace(settings, steps=2), folder / "in two")
    train_rank(rank, settings, folder / "in two", resume=True)


def test_cumulative_statistics_of_replicas_go_on_exactly(tmp_path: Path) -> None:
    """What a batch weighs in them depends on a count, which differs between these replicas."""
    settings = unverified_plan(
        (1, 2), Schedule.FLUSH, 3, model=CUMULATIVE, steps=4, checkpoint=CheckpointSettings(every_steps=2)
    )
    run_ranks(3, in_two_runs, settings, tmp_path)
    at_once, in_two = (saved_weights(tmp_path / name) for name in ("at once", "in two"))
    assert largest_difference(at_once, in_two) == 0.0
    assert int(at_once["2.batches"]) == 8
