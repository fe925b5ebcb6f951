"""Losses that are not the mean of their parts are reported before a batch is trained in parts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import DataSettings
from plait.training import components
from plait.training.checks.loss_parts import describe_parts
from support.plans import planned
from support.training import digits_job, train_here, train_rank
from support.world import run_ranks

IGNORING = "test_loss_parts:without_small_digits"
SUMMED = "test_loss_parts:summed_without_small_digits"


def without_small_digits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target.masked_fill(target < 3, -1), ignore_index=-1)


def summed_without_small_digits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same over the number of samples: the mean of its parts."""
    kept = target.masked_fill(target < 3, -1)
    return nn.functional.cross_entropy(output, kept, ignore_index=-1, reduction="sum") / len(target)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, False),
        ({"loss": IGNORING}, True),
        ({"loss": IGNORING, "precision": "bf16"}, True),
        ({"loss": SUMMED}, False),
        ({"loss": SUMMED, "precision": "float32"}, False),
        ({"loss": "torch.nn:CrossEntropyLoss", "loss_args": {"label_smoothing": 0.1}}, False),
        ({"loss_args": {"weight": [1.0 + 2 * i for i in range(10)]}}, True),
        ({"loss_args": {"weight": [2.0] * 10}}, False),
    ],
)
def test_a_loss_that_leaves_targets_out_or_weights_classes_is_warned_of(
    changes: dict[str, Any], warned: bool
) -> None:
    settings = digits_job(**changes)
    words = describe_parts(settings, components.build(settings, torch.device("cpu")), workers=2)
    assert ("as the mean of their parts" in words) is warned


def warnings_of(rank: int, run: Any, settings: Any, folder: Path) -> list[str]:
    """What a run warns of."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("plait").addHandler(handler)
    run(rank, settings, folder)
    return [words for words in found if words.startswith("loss: of ")]


def in_one_process(rank: int, settings: Any, folder: Path) -> None:
    train_here(settings, folder)


def test_a_run_in_parts_warns_of_such_a_loss_and_one_on_whole_batches_does_not(tmp_path: Path) -> None:
    pipeline = planned((1,), Schedule.FLUSH, 4, steps=1, loss=IGNORING)
    (warned,) = run_ranks(1, warnings_of, train_rank, pipeline, tmp_path / "pipeline")
    assert len(warned) == 1
    jobs = {count: digits_job(steps=1, loss=IGNORING, accumulate=count) for count in (1, 2)}
    for count, job in jobs.items():
        assert len(warnings_of(0, in_one_process, job, tmp_path / str(count))) == count - 1


class PaddedLater(torch.utils.data.Dataset[Any]):
    """Targets of which some are left out, none of them among the first."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 8, 8), i / 400), -100 if i > 100 and i % 3 == 0 else i % 10


def padded_later(split: str) -> PaddedLater:
    return PaddedLater()


def test_targets_that_are_left_out_later_in_the_set_are_seen() -> None:
    settings = digits_job(data=DataSettings("test_loss_parts:padded_later", 64))
    words = describe_parts(settings, components.build(settings, torch.device("cpu")), workers=2)
    assert "as the mean of their parts" in words
