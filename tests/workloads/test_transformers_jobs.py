"""Models of transformers from a job's settings train by their own loss as in a plain loop of torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core.errors import JobError
from plait.data.sampler import Position, batches
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import components
from plait.training.setup.model import build_model
from plait.workloads.data import build
from plait.workloads.from_transformers import from_config
from support.training import digits_job, largest_difference, train_here
from support.workloads import Arguments

SAMPLES, BATCH, STEPS = 12, 6, 3
WIDE = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SHORT = {"vocab_size": 40, "max_position_embeddings": 16}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
GPT2 = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {**WIDE, **NO_DROPOUT, **SHORT}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, **NO_DROPOUTS}),
    "t5": ("T5ForConditionalGeneration", {**T5, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", {**WIDE, **NO_DROPOUT, **IMAGES}),
}


def job(model: str, **changes: Any) -> TrainSettings:
    architecture, config = MODELS[model]
    args = {"architecture": architecture, "config": config}
    return digits_job(
        model=ModelSettings("plait.workloads.from_transformers:from_config", args),
        data=DataSettings("support.workloads:Arguments", BATCH, {"images": model == "vit"}),
        loss="model",
        optimizer=OptimizerSettings("adam", {"lr": 0.01}),
        steps=STEPS,
        **changes,
    )


def plain_loop(model: str) -> tuple[dict[str, torch.Tensor], float]:
    """Weights and test loss of a loop over batches in two halves, whose means padding makes unlike."""
    settings = job(model)
    module = build_model(settings.model, settings.seed).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train, test = (Arguments(split, images=model == "vit") for split in ("train", "test"))
    for batch in islice(batches(Position(), SAMPLES, BATCH, seed=0, shuffle=True, keep_last=True), STEPS):
        optimizer.zero_grad()
        for half in (batch.samples[: BATCH // 2], batch.samples[BATCH // 2 :]):
            (module(**stacked(train, half)).loss / 2).backward()
        optimizer.step()
    with torch.no_grad():
        module.eval()
        parts = [module(**stacked(test, range(i, i + 3))).loss.item() for i in range(0, SAMPLES, 3)]
    return module.state_dict(), sum(parts) / len(parts)


def stacked(dataset: Arguments, numbers: Any) -> dict[str, torch.Tensor]:
    found = torch.utils.data.default_collate([dataset[i] for i in numbers])
    return {name: x.double() if x.is_floating_point() else x for name, x in found.items()}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_alike_in_a_plain_loop_and_in_a_run(model: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    weights, loss = plain_loop(model)
    evaluate = EvaluateSettings(batch_size=BATCH // 2)
    result, found = train_here(job(model, accumulate=2, evaluate=evaluate), tmp_path)
    assert largest_difference(found, weights) < 1e-6
    assert result.test["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"architecture": "GPT2LMHeadModl"}, "found 'GPT2LMHeadModl', expected a model.*'GPT2LMHeadModel'"),
        ({"architecture": "GPT2Config"}, "expected a model class of transformers"),
        (
            {"architecture": "GPT2LMHeadModel", "config": {"n_layers": 2}},
            r"model_args\.config\.n_layers: GPT2Config has no such setting.*n_layer",
        ),
    ],
)
def test_an_architecture_or_setting_that_transformers_lacks_is_reported(args: Any, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(JobError, match=message):
        from_config(**args)


def test_data_with_more_tokens_than_the_configuration_has_is_refused() -> None:
    pytest.importorskip("transformers")
    lines = DataSettings("text_lines:synthetic_lines", 4, {"vocabulary": 50})
    with pytest.raises(JobError, match=r"model_args\.config\.vocab_size: found 40, but .* has 50 tokens"):
        components.build(replace(job("gpt2"), data=lines), torch.device("cpu"))


def test_lines_that_are_longer_than_the_models_places_are_refused() -> None:
    pytest.importorskip("transformers")
    lines = DataSettings("text_lines:synthetic_lines", 4, {"length": 17, "vocabulary": 9})
    with pytest.raises(JobError, match=r"data\.length: found samples of 17 tokens .* has 16 places; shorten"):
        components.build(replace(job("gpt2"), data=lines), torch.device("cpu"))


def test_lines_of_a_text_are_padded_and_padding_is_no_target(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a b c\n\nb a\na\nd a\n")
    train = build("text_lines:text_lines", "train", path=str(path), length=2, test_fraction=0.25)
    assert (len(train), train.vocabulary) == (3, 4)
    assert train[0]["input_ids"].tolist() == [1, 2]
    short = {name: value.tolist() for name, value in train[2].items()}
    assert short == {"input_ids": [1, 0], "attention_mask": [1, 0], "labels": [1, -100]}
    test = build("text_lines:text_lines", "test", path=str(path), length=2, test_fraction=0.25)
    assert test[0]["input_ids"].tolist() == [0, 1]
    assert build("text_lines:text_lines", "train", path=str(path), level="byte").vocabulary == 256
