"""The fusion experiment measures what it is asked for and says what failed."""

from __future__ import annotations

import pytest
import torch

from plait.core.errors import InputError
from plait_bench.fusion import partial
from plait_bench.fusion.bench import run, write_plot
from plait_bench.fusion.cases import CPU_CASES
from plait_bench.fusion.convergence import convergence
from plait_bench.fusion.convergence import write_plot as write_curves
from plait_bench.fusion.processes import together
from plait_bench.harness import Bench


def test_rows_claims_and_picture_cover_what_was_asked_for(tmp_path):
    asked = {"models": ["mlp", "dcgan"], "widths": (2,), "modes": ("serial", "vmap", "fused", "mps")}
    bench = run(["speed"], **asked, repeats=1, device="cpu")
    rows = {(row["model"], row["mode"]): row for row in bench.rows}
    assert len(rows) == 8
    assert rows["mlp", "fused"]["trials"] == 2
    assert rows["mlp", "fused"]["speedup"] > 0
    assert rows["dcgan", "vmap"]["speedup"] > 0
    assert "CUDA_MPS_PIPE_DIRECTORY is not set" in rows["mlp", "mps"]["failed"]
    assert [claim.goal for claim in bench.claims] == ["at least 4", "at least 1"]
    assert all(claim.value is not None for claim in bench.claims)
    assert bench.as_json()["name"] == "fusion"
    write_plot(bench, tmp_path / "fusion.png")
    assert (tmp_path / "fusion.png").stat().st_size > 1000


def test_the_slowest_of_several_processes_says_how_long_a_round_took():
    assert together([[1.0, 4.0], [2.0, 3.0]]) == [2.0, 4.0]
    assert together([[1.0], "OutOfMemoryError: no memory"]) == "OutOfMemoryError: no memory"


def test_an_unknown_model_or_mode_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="'mpl'.*did you mean 'mlp'"):
        run(models=["mpl"], device="cpu")
    with pytest.raises(InputError, match="'fusd'.*did you mean 'fused'"):
        run(models=["mlp"], modes=["fusd"], device="cpu")


# That fused trials train as they do alone is shown in tests/fusion/test_fused_training.py.
@pytest.mark.extended
def test_fused_curves_lie_on_the_serial_ones(tmp_path):
    rows, (claim,) = convergence(rates=(0.01, 0.1), steps=10, seeds=(0,))
    assert claim.holds, claim
    # Both learn, and the rates differ: equal curves are not equal for want of movement.
    assert [row["step"] for row in rows if row["lr"] == 0.1] == [1, 5, 10]
    assert rows[2]["serial_loss"] < rows[0]["serial_loss"]
    assert abs(rows[2]["serial_loss"] - rows[5]["serial_loss"]) > 0.1
    write_curves(Bench("fusion-convergence", "", rows, [claim]), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


# That modules can be left out of fusion is shown in tests/fusion/test_unfused_modules.py.
@pytest.mark.extended
def test_blocks_are_left_unfused_and_timed_against_the_trials_one_after_another(tmp_path):
    rows = partial.measure("resnet18-tiny", CPU_CASES["resnet18-tiny"], torch.device("cpu"), (0, 10), 1, 2)
    assert [row["fused_blocks"] for row in rows] == [None, 0, 10]
    assert all(row["speedup_min"] <= row["speedup"] <= row["speedup_max"] for row in rows)
    partial.write_plot(Bench("fusion-partial", "", rows, ()), tmp_path / "partial.png")
    assert (tmp_path / "partial.png").stat().st_size > 1000
