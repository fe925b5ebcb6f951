"""A loop's own means, under Plait's objects: bf16 autocast, and models or stages that run compiled."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.core.errors import InputError
from plait.data.call_model import compile_in_place
from support.world import run_ranks

BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile on the CPU needs g++, which is not installed"
)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 4, (24,), generator=generator)


def in_parallel(rank: int, compiled: bool, dtype: torch.dtype, autocast: Any) -> list[float]:
    """Losses over the whole batch in a loop of two workers with DataParallel, one of them with more."""
    model, (x, y) = net(dtype), batch(dtype)
    parallel = plait.DataParallel(torch.compile(model) if compiled else model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    share = slice(0, 10) if rank == 0 else slice(10, 24)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with autocast():
            F.cross_entropy(parallel(x[share]), y[share]).backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad(), autocast():
            losses.append(float(F.cross_entropy(model(x), y)))
    return losses


def in_stages(rank: int, compiled: bool, dtype: torch.dtype, autocast: Any, schedule: str) -> list[float]:
    """Losses in a loop with Pipeline, on as many workers as there are."""
    x, y = batch(dtype)
    pipe = plait.Pipeline(
        net(dtype),
        ["3"],
        example_inputs=(x,),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        microbatches=3,
        schedule=schedule,
        clip_norm=0.5,
        autocast=autocast,
        compile=compiled,
        verify=False,
    )
    losses = [float(pipe.step(x[: 24 - step], y[: 24 - step])) for step in range(3)]
    with autocast():
        losses.append(float(F.cross_entropy(pipe.evaluate(x), y)))
    pipe.close()
    return losses


def plainly(dtype: torch.dtype, autocast: Any) -> list[float]:
    model, (x, y) = net(dtype), batch(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with autocast():
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad(), autocast():
            losses.append(float(F.cross_entropy(model(x), y)))
    return losses


def both(rank: int, compiled: bool, dtype: torch.dtype, autocast: Any, *schedules: str) -> list[list[float]]:
    loops = [in_parallel(rank, compiled, dtype, autocast)]
    return loops + [in_stages(rank, compiled, dtype, autocast, schedule) for schedule in schedules]


def no_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


def test_bf16_autocast_and_clipping_in_a_loop_are_those_of_one_process() -> None:
    parallel, staged = run_ranks(2, both, False, torch.float32, BF16, "flush")[0]
    # Sums of bf16 products, of which a digit is worth 8e-3, are rounded in other orders.
    assert parallel == pytest.approx(plainly(torch.float32, BF16), abs=5e-3)
    assert staged == pytest.approx(in_stages(0, False, torch.float32, BF16, "flush"), abs=5e-3)


@needs_compiler
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_compiled_models_and_stages_train_as_plain_ones() -> None:
    schedules = ("flush", "stash")
    found = run_ranks(2, both, True, torch.float64, no_autocast, *schedules, deadline_s=500)[0]
    expected = run_ranks(2, both, False, torch.float64, no_autocast, *schedules)[0]
    assert expected[0] == pytest.approx(plainly(torch.float64, no_autocast), abs=1e-10)
    for compiled, plain in zip(found, expected):
        assert compiled == pytest.approx(plain, abs=1e-10)


@needs_compiler
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_compiled_run_is_audited_against_the_plain_model_and_ends_as_it(tmp_path: Path) -> None:
    x, y = batch(torch.float64)
    common: dict[str, Any] = {"data": ((x, y), (x, y)), "steps": 4, "batch_size": 10, "precision": "float64"}
    dropping = nn.Sequential(net(torch.float64), nn.Dropout(0.3), nn.Linear(4, 4, dtype=torch.float64))
    runs = [
        plait.train(model=dropping, run_dir=str(tmp_path), compile=compiled, **common)
        for compiled in (True, False)
    ]
    assert runs[0].test == pytest.approx(runs[1].test, abs=1e-10)
    assert (runs[0].audited_steps, runs[1].audited_steps) == (2, None)


def test_what_cannot_be_compiled_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled(nn.Module):
        """What torch.compile returns has the model as this attribute."""

        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = net()

    arguments: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD}
    with pytest.raises(InputError, match=r"compiled already.*pass the model itself and compile=True"):
        plait.Pipeline(Compiled(), 2, example_inputs=batch()[:1], **arguments)
    with pytest.raises(InputError, match="compile: found true, but trials of a sweep train fused"):
        plait.sweep({**digits_content(), "compile": True}, {"optimizer.lr": [0.1, 0.2]})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"compile: .*needs a C\+\+ compiler.*no-such-compiler"):
        compile_in_place(net(), torch.device("cpu"), "compile")


def digits_content() -> dict[str, Any]:
    return {
        "name": "t",
        "model": "support.training:small_net",
        "data": {"kind": "digits", "batch_size": 8},
        "steps": 1,
    }
