"""Models of the transformers library, built from a small configuration, train in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.traced_models import as_double, staged_step, tokens, whole_step


@pytest.fixture(autouse=True)
def _library() -> None:
    """Imported by the tests alone: it takes a second, which every process that collects tests would pay."""
    pytest.importorskip("transformers", reason="the transformers library is not installed")


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def bert(head: str) -> Any:
    import transformers

    config = transformers.BertConfig(vocab_size=99, max_position_embeddings=32, **SMALL)
    return getattr(transformers, head)(config)


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=99, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def vit() -> Any:
    import transformers

    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)
    return transformers.ViTForImageClassification(config)


def t5() -> Any:
    import transformers

    config = transformers.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def text(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return tokens(batch, length, 99), mask


MODELS: dict[str, Any] = {
    "bert-classifier": (lambda: bert("BertForSequenceClassification"), text),
    "bert-with-loss": (
        lambda: bert("BertForSequenceClassification"),
        lambda batch, length: {"input_ids": tokens(batch, length, 99), "labels": torch.arange(batch) % 2},
    ),
    "bert-masked": (lambda: bert("BertForMaskedLM"), text),
    "gpt2": (gpt2, lambda batch, length: (tokens(batch, length, 99),)),
    "vit": (vit, lambda batch, _: (torch.randn(batch, 3, 16, 16),)),
    "t5": (
        t5,
        lambda batch, length: {
            "input_ids": tokens(batch, length, 99),
            "decoder_input_ids": tokens(batch, length - 2, 99),
        },
    ),
}


# Those with their loss train in stages in training/test_model_loss.py, too.
MORE = {"bert-classifier", "bert-with-loss", "gpt2", "vit", "t5"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name in MORE)) for name in MODELS]
)
def test_a_transformers_model_trains_in_stages_at_other_batch_and_sequence_sizes(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    example, other = as_double(inputs(4, 11)), as_double(inputs(3, 9))
    staged_step(model, other, example, 5).assert_equals(whole_step(model, other))
