"""`loss: model`: models that compute their own loss train as in a plain loop, however the work is shared."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from plait.core.errors import DataError, JobError
from plait.data.sampler import Position, batches
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import UNVERIFIED, DataSettings, ModelSettings, OptimizerSettings, TrainSettings
from plait.training.setup.model import build_model
from plait.workloads.losses import model_loss
from support.plans import cut_in_two
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import digits_job, largest_difference, saved_weights, train_each, train_here
from support.world import run_ranks

SAMPLES, STEPS = 24, 6


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False, bos_token_id=0, eos_token_id=0))


class Labelled:
    """Texts as dicts of the model's arguments, labels included, and nothing else."""

    def __init__(self, split: str, tokens: bool = False) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.texts = torch.randint(1, 40, (SAMPLES, 8), generator=generator)
        self.labels = self.texts if tokens else self.texts.sum(1) % 3

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"labels": self.labels[index], "input_ids": self.texts[index]}


def job(model: str = "bert", **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model": ModelSettings(f"test_model_loss:{model}"),
        "data": DataSettings("test_model_loss:Labelled", 6, {"tokens": model == "gpt2"}),
        "loss": "model",
        "optimizer": OptimizerSettings("adam", {"lr": 0.01}),
        "steps": STEPS,
    }
    return digits_job(**{**values, **changes})


def plain_loop(settings: TrainSettings) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of a loop as anyone would write it, and the loss on the test split."""
    model = build_model(settings.model, settings.seed).double()
    train, test = (Labelled(split, **settings.data.options) for split in ("train", "test"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    order = batches(Position(), SAMPLES, 6, seed=0, shuffle=True, keep_last=True)
    for batch in islice(order, STEPS):
        samples = [train[i] for i in batch.samples]
        optimizer.zero_grad()
        model_loss(model(**torch.utils.data.default_collate(samples)), None).backward()
        optimizer.step()
    with torch.no_grad():
        found = model.eval()(**torch.utils.data.default_collate([test[i] for i in range(SAMPLES)]))
    return model.state_dict(), model_loss(found, None).item()


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_a_model_of_transformers_trains_by_its_own_loss_as_in_a_plain_loop(
    model: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    weights, loss = plain_loop(job(model))
    result, found = train_here(job(model), tmp_path)
    assert largest_difference(found, weights) < 1e-6
    assert result.test == {"loss": pytest.approx(loss, abs=1e-6)}
    assert train_here(job(model, precision="bf16"), tmp_path / "bf16")[0].test["loss"] < 1.1 * loss + 0.2


def test_two_workers_and_stages_take_the_same_steps_by_the_models_own_loss(tmp_path: Path) -> None:
    # Verified once: the others are compared here.
    jobs = {
        "two": own_job("named", accumulate=2, data=replace(job().data, loaders=1), verify=UNVERIFIED),
        "flush": cut_in_two(own_job("named"), Schedule.FLUSH, 2),
        "gpipe": cut_in_two(own_job("dict", verify=UNVERIFIED), Schedule.GPIPE, 3),
        # With one microbatch in flight no weights are old: stash is the plain loop.
        "stash": cut_in_two(own_job("tuple", verify=UNVERIFIED), Schedule.STASH, 1, depths={0: 1, 1: 1}),
    }
    result = run_ranks(2, train_each, jobs, tmp_path)[0]
    for name, settings in jobs.items():
        weights, loss = plain_loop(settings)
        assert largest_difference(saved_weights(tmp_path / name), weights) < 1e-6, name
        assert result[name].test["loss"] == pytest.approx(loss, abs=1e-6), name


def test_fused_trials_train_by_the_models_own_loss_as_each_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sweep = sweep_of("optimizer.lr=0.01,0.002", "data.batch_size=4,6", job=job("gpt2"), width=4)
    result = sweep_here(sweep, tmp_path / "sweep")
    assert len(result["trials"]) == 4
    for trial in result["trials"]:
        alone, _ = trial_alone(sweep, trial["values"], tmp_path / f"{trial['trial']}")
        assert trial["metrics"]["loss"] == pytest.approx(alone.test["loss"], abs=1e-6)


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class OwnLoss(nn.Module):
    """A model that gives its loss in the form asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.Linear(8, 3)
        self.form = form

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(torch.tanh(self.first(input_ids.double() / 40)))
        loss = nn.functional.cross_entropy(logits, labels)
        forms = {
            "named": Output(loss, logits),
            "dict": {"logits": logits, "loss": loss},
            "tuple": (loss, logits),
            "tensor": loss,
            "shape (1,)": (loss.unsqueeze(0), logits),
            "logits": logits,
            "empty": {"loss": None, "logits": logits},
        }
        return forms[self.form]


def own_job(form: str, **changes: Any) -> TrainSettings:
    return replace(job(**changes), model=ModelSettings("test_model_loss:OwnLoss", {"form": form}))


@pytest.mark.parametrize("form", ["dict", "tuple", "tensor", "shape (1,)"])
def test_the_loss_is_found_wherever_a_model_puts_it(form: str, tmp_path: Path) -> None:
    named, weights = train_here(own_job("named"), tmp_path / "named")
    result, found = train_here(own_job(form), tmp_path / "other")
    assert largest_difference(found, weights) == 0.0
    assert result.test == named.test


@pytest.mark.parametrize("form", ["logits", "empty"])
def test_a_model_that_gives_no_loss_is_refused_with_what_is_expected(form: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="found 'model', but the model returned a .* which holds no loss"):
        train_here(own_job(form), tmp_path)


def test_dicts_alone_are_batches_only_where_the_model_has_the_loss(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gave a dict a sample, expected .* use loss: model"):
        train_here(own_job("logits", loss="cross-entropy"), tmp_path)
