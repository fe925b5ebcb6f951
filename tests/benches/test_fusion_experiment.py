"""The fusion experiment measures what it is asked for and says what failed."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from plait.core.errors import InputError
from plait_bench.fusion import partial
from plait_bench.fusion.bench import run, write_plot
from plait_bench.fusion.cases import CPU_CASES, fused_step
from plait_bench.fusion.convergence import convergence
from plait_bench.fusion.convergence import write_plot as write_curves
from plait_bench.fusion.hfta import HOW_TO_GET, hfta_step
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
    assert [claim.goal for claim in bench.claims] == [">= 4x", ">= 1x"]
    assert all(claim.value is not None for claim in bench.claims)
    assert bench.as_json()["name"] == "fusion"
    write_plot(bench, tmp_path / "fusion.png")
    assert (tmp_path / "fusion.png").stat().st_size > 1000


def test_where_hfta_cannot_be_imported_its_rows_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hfta", None)
    rows = run(["rivals"], models=["mlp"], widths=(2,), repeats=1, device="cpu").rows
    assert [row["mode"] for row in rows] == ["serial", "vmap", "hfta", "fused"]
    assert [row["mode"] for row in rows if "failed" in row] == ["hfta"]
    assert "git clone" in rows[2]["failed"]
    assert rows[2]["failed"].endswith("PYTHONPATH")


@pytest.fixture
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CPU_CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_hfta_has_the_losses_of_our_arrays_on_the_same_weights_and_data(name, channels_last, in_float64):
    pytest.importorskip("hfta", reason=HOW_TO_GET)
    losses = []
    for make in (fused_step, functools.partial(hfta_step, channels_last=channels_last)):
        torch.manual_seed(0)
        step, inputs, _ = make(CPU_CASES[name], torch.device("cpu"), 3)
        losses.append(torch.stack([step(*inputs) for _ in range(3)]))
    assert not torch.equal(losses[0][0], losses[0][-1])
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


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
    assert all(row["lowest"] <= row["speedup"] <= row["highest"] for row in rows)
    partial.write_plot(Bench("fusion-partial", "", rows, ()), tmp_path / "partial.png")
    assert (tmp_path / "partial.png").stat().st_size > 1000
