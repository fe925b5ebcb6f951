"""What factories draw at random follows the job's seed: splits complement each other, two runs are equal."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from plait.core.codec import encode
from plait.jobs.evaluate import measure_run
from plait.launcher.run_dir import RunDir
from plait.schema.settings import DataSettings, ModelSettings, TrainSettings
from plait.training.setup.data import build_data
from plait.training.setup.model import build_model
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job, train_here


def coins(count: int = 120) -> TensorDataset:
    """Points whose labels say nothing: nobody can be right more often than by chance on unseen ones."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randint(2, (count,), generator=generator)
    )


def by_torch(split: str) -> Dataset[Any]:
    return random_split(coins(), [80, 40])[split == "test"]


def by_numpy(split: str) -> Dataset[Any]:
    order = numpy.random.permutation(120).tolist()
    return Subset(coins(), order[:80] if split == "train" else order[80:])


def by_python(split: str) -> Dataset[Any]:
    order = list(range(120))
    random.shuffle(order)
    return Subset(coins(), order[:80] if split == "train" else order[80:])


FACTORIES = ["by_torch", "by_numpy", "by_python"]


class Drawn(nn.Module):
    """A layer whose weights come from all three sources of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        with torch.no_grad():
            self.layer.weight[0] += torch.from_numpy(numpy.random.randn(4)).float()
            self.layer.weight[1, 0] += random.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def job(factory: str = "by_torch", **changes: Any) -> TrainSettings:
    own = DataSettings(f"test_seeded_factories:{factory}", 20)
    return digits_job(
        **{"data": own, "model": ModelSettings("test_seeded_factories:Drawn"), "steps": 8, **changes}
    )


def indices_of(settings: TrainSettings, split: Any) -> list[int]:
    source = build_data(settings, split)
    assert source is not None
    return list(source.dataset.indices)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_random_split_gives_parts_that_complement_each_other(factory: str):
    train, test = (indices_of(job(factory), split) for split in ("train", "test"))
    assert sorted(train + test) == list(range(120))
    assert indices_of(job(factory), "train") == train
    assert indices_of(job(factory, seed=1), "train") != train


def test_two_models_of_one_seed_are_equal_whatever_they_drew_from():
    first, again, other = (build_model(job().model, seed).state_dict()["layer.weight"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_module_that_draws_while_it_is_imported_is_the_same_whoever_imports_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for number, first in enumerate(("model", "data")):
        name = f"drawn_at_import_{number}"
        (tmp_path / f"{name}.py").write_text(
            "import torch\nfrom test_seeded_factories import coins\n"
            "PARTS = torch.utils.data.random_split(coins(), [80, 40])\n"
            "def data(split):\n    return PARTS[split == 'test']\n"
            "def model():\n    return torch.nn.Linear(4, 2)\n"
        )
        settings = job(data=DataSettings(f"{name}:data", 20), model=ModelSettings(f"{name}:model"))
        if first == "model":
            build_model(settings.model, settings.seed)
        found.append(indices_of(settings, "train"))
    assert found[0] == found[1]


def test_trials_of_other_seeds_are_trained_on_what_their_own_factory_draws(tmp_path: Path):
    settings = sweep_of("seed=0,1", "optimizer.lr=0.01,0.1", job=job())
    found = sweep_here(settings, tmp_path / "sweep")
    for row in found["trials"]:
        alone, _ = trial_alone(settings, row["values"], tmp_path / f"alone-{row['trial']}")
        assert row["metrics"] == pytest.approx(alone.test, abs=1e-9)
    assert {tuple(array["trials"]) for array in found["arrays"]} == {(0, 1), (2, 3)}


def test_data_that_draws_nothing_is_shared_by_trials_of_all_seeds(tmp_path: Path):
    settings = sweep_of("seed=0,1", job=digits_job(steps=2))
    assert [array["trials"] for array in sweep_here(settings, tmp_path)["arrays"]] == [[0, 1]]


def test_a_run_is_measured_on_the_test_split_it_was_trained_with(tmp_path: Path):
    settings = job()
    result, _ = train_here(settings, tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps(encode(settings)))
    assert measure_run(RunDir(tmp_path))["metrics"] == pytest.approx(result.test, abs=1e-12)
