"""The example scripts of the library give the loss of one process, however they are started."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from support.world import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_parallel.py"


def run_example(_rank: int, path: Path) -> str:
    """What the script prints in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch("sys.argv", ["", str(path)]):
        runpy.run_path(str(EXAMPLE))
    return out.getvalue()


def loss_in(text: str) -> float:
    return float(text.split("loss ")[1])


def test_a_run_of_two_workers_and_what_one_makes_of_its_checkpoint_have_the_loss_of_one(tmp_path: Path):
    (alone,) = run_ranks(1, run_example, tmp_path / "alone")
    first, other = run_ranks(2, run_example, tmp_path / "shared")
    assert other == ""
    assert abs(loss_in(first) - loss_in(alone)) < 1e-10
    # The checkpoint is one of the last epoch, before its last batch.
    (resumed,) = run_ranks(1, run_example, tmp_path / "shared")
    assert abs(loss_in(resumed) - loss_in(alone)) < 1e-10


@pytest.mark.extended  # the test above runs it in processes that have torch
def test_the_same_holds_under_torchrun(tmp_path: Path):
    def run(*words: str) -> float:
        command = [sys.executable, *words, str(EXAMPLE), str(tmp_path / f"{len(words)}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return loss_in(done.stdout)

    assert abs(run("-m", "torch.distributed.run", "--nproc-per-node", "2") - run()) < 1e-10
