"""The code of other projects in our benches trains the same; where it is missing, they say how to get it."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

import adapters_gpu
from plait.core.errors import InputError
from plait_bench.fusion.bench import run
from plait_bench.fusion.cases import CPU_CASES, fused_step
from plait_bench.fusion.hfta import HOW_TO_GET, hfta_step
from plait_bench.fusion.mlora import mlora_step


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


def test_where_mlora_cannot_be_imported_its_mode_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlora", None)
    with pytest.raises(InputError, match=r"git clone.*PYTHONPATH"):
        mlora_step(torch.nn.Linear(1, 1), [], 0.1)
    assert not hasattr(torch, "List")


def test_mlora_has_the_losses_of_adapters_alone_on_the_same_weights_and_data():
    pytest.importorskip("transformers")
    base = adapters_gpu.base_of("tiny", torch.device("cpu")).float()
    models = adapters_gpu.adapted(base, 3)
    try:
        step, _ = mlora_step(base, models, adapters_gpu.LR)
    except InputError as failure:
        pytest.skip(str(failure))
    ids = torch.randint(128, (3, 1, 16))
    lone = [adapters_gpu.lone_step(model, own, False)[0] for model, own in zip(models, ids)]
    losses = [step(ids) for _ in range(3)]
    alone = [torch.stack([own(x) for own, x in zip(lone, ids)]) for _ in range(3)]
    assert not torch.equal(losses[0], losses[-1])
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=0)
