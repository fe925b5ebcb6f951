"""A job on processes that another launcher has started is the run that `plait train` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from plait.core.errors import InputError
from plait.jobs.joined import train_joined
from plait.jobs.train import train
from plait.schema.job import make_job
from support.world import run_ranks

JOB: dict[str, Any] = {
    "name": "joined",
    "model": "support.training:small_net",
    "data": {"kind": "support.training:digits", "batch_size": 60},
    "loss": "cross-entropy",
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
    "steps": 6,
    "precision": "float64",
    "device": "cpu",
    "verify": "off",
}
PLANS = {"workers": {}, "stages": {"plan": "model-parallel"}}


def _joined(rank: int, path: str, folder: str, resume: bool = False, **keys: Any) -> tuple[Any, str]:
    overrides = [(key.replace("__", "."), value) for key, value in keys.items()]
    try:
        result = train_joined(path, overrides, run_folder=folder, resume=resume)
    except InputError as failure:
        return None, str(failure)
    return result.step, ""


def _weights(folder: str | Path) -> dict[str, Any]:
    return load_file(sorted(Path(folder).glob("checkpoints/*/model.safetensors"))[-1])


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def _write(folder: Path, **parallel: Any) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, "run_dir": str(folder), "parallel": parallel}))
    return str(path)


@pytest.mark.parametrize("plan", ["workers", pytest.param("stages", marks=pytest.mark.extended)])
@pytest.mark.usefixtures("forked_commands")
def test_a_joined_job_ends_as_the_same_job_that_plait_launches(tmp_path: Path, plan: str) -> None:
    path, here = _write(tmp_path, **PLANS[plan]), str(tmp_path / "here")
    # Interrupted in the middle: half of the steps, then the rest by other processes.
    halves = [
        run_ranks(2, _joined, path, here, again, steps=steps) for again, steps in ((False, 3), (True, 6))
    ]
    assert halves == [[(3, ""), (3, "")], [(6, ""), (6, "")]]
    launched = {**JOB, "run_dir": str(tmp_path), "parallel": {"workers": 2, **PLANS[plan]}}
    assert _is_equal(_weights(here), _weights(train(make_job(launched)).run))


def test_what_one_process_refuses_ends_all_with_its_reason(tmp_path: Path) -> None:
    path, here = _write(tmp_path), str(tmp_path / "here")
    for keys, why in (
        ({"optimizer__lr": "much"}, "optimizer.lr"),
        ({"parallel__elastic": True}, "decides which workers there are"),
        ({"parallel__plan": "auto"}, "make a plan first"),
        ({"model": "support.training:no_net"}, "no_net"),
    ):
        refused = run_ranks(2, _joined, path, here, **keys)
        assert [value for value, _ in refused] == [None, None]
        assert all(why in text for _, text in refused), refused
    assert not Path(here).exists()
