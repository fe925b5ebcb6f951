"""Models of the transformers library from tiny configurations: these sizes, and no other setting."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Batch = tuple[Any, ...] | dict[str, Any]

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4, "num_channels": 3}
SPEECH = {
    **SIZES,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
ENCODER_DECODER = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    **TOKENS, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
FEW_HEADS = {**SIZES, **TOKENS, "num_key_value_heads": 2}
EXPERTS = {**FEW_HEADS, "num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 32}

# By type: the head, the sizes, and the kind of input.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        kind: ("SequenceClassification", {**SIZES, "pad_token_id": 0}, "text")
        for kind in (
            *("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "roformer", "layoutlm"),
            *("mpnet", "nystromformer", "megatron-bert", "convbert", "deberta", "deberta-v2", "rembert"),
            *("mobilebert", "esm"),
        )
    },
    "albert": ("SequenceClassification", {**SIZES, "embedding_size": 16, "pad_token_id": 0}, "text"),
    "distilbert": (
        "SequenceClassification",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
        "text",
    ),
    "fnet": ("SequenceClassification", {**SIZES, "pad_token_id": 0}, "ids"),
    "xlnet": (
        "SequenceClassification",
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
        "text",
    ),
    "gpt2": ("CausalLM", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, **TOKENS}, "text"),
    "gptj": (
        "CausalLM",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, **TOKENS},
        "text",
    ),
    "gpt_neo": (
        "CausalLM",
        {**SIZES, **TOKENS, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
        "text",
    ),
    "codegen": (
        "CausalLM",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, **TOKENS},
        "text",
    ),
    "gpt_bigcode": (
        "CausalLM",
        {"vocab_size": 99, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, **TOKENS},
        "text",
    ),
    "bloom": ("CausalLM", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 2, **TOKENS}, "text"),
    "mpt": ("CausalLM", {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 2, **TOKENS}, "text"),
    "opt": ("CausalLM", {**SIZES, **TOKENS, "ffn_dim": 64, "word_embed_proj_dim": 32}, "text"),
    **{
        kind: ("CausalLM", {**SIZES, **TOKENS}, "text")
        for kind in ("gpt_neox", "biogpt", "falcon", "phi", "openai-gpt", "xglm")
    },
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "phi3", "stablelm", "olmo", "starcoder2", "granite"),
            "cohere",
        ),
        ("CausalLM", FEW_HEADS, "text"),
    ),
    "qwen3": ("CausalLM", {**FEW_HEADS, "head_dim": 16}, "text"),
    "gemma": ("CausalLM", {**FEW_HEADS, "head_dim": 16}, "text"),
    "gemma2": ("CausalLM", {**FEW_HEADS, "head_dim": 16}, "text"),
    "mixtral": ("CausalLM", EXPERTS, "text"),
    "mamba": ("CausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, **TOKENS}, "ids"),
    "t5": ("Seq2SeqLM", T5, "pair"),
    "mt5": ("Seq2SeqLM", T5, "pair"),
    "bart": ("Seq2SeqLM", ENCODER_DECODER, "pair"),
    "mbart": ("Seq2SeqLM", ENCODER_DECODER, "pair"),
    "pegasus": ("Seq2SeqLM", ENCODER_DECODER, "pair"),
    "marian": ("Seq2SeqLM", ENCODER_DECODER, "pair"),
    "vit": ("ImageClassification", IMAGE, "image"),
    "beit": ("ImageClassification", IMAGE, "image"),
    "deit": ("ImageClassification", {**IMAGE, "architectures": ["DeiTForImageClassification"]}, "image"),
    "dinov2": ("ImageClassification", IMAGE, "image"),
    "swin": (
        "ImageClassification",
        {
            "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1],
            "num_heads": [2, 2], "window_size": 4,
        },
        "image",
    ),
    "convnext": (
        "ImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "image",
    ),
    "resnet": (
        "ImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "image",
    ),
    "regnet": (
        "ImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
        "image",
    ),
    "segformer": (
        "ImageClassification",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        },
        "image",
    ),
    "poolformer": (
        "ImageClassification",
        {
            "hidden_sizes": [8, 16], "num_encoder_blocks": 2, "depths": [1, 1], "patch_sizes": [3, 3],
            "strides": [2, 2], "padding": [1, 1], "mlp_ratio": 2.0,
        },
        "image",
    ),
    "wav2vec2": ("AudioClassification", SPEECH, "speech"),
    "hubert": ("AudioClassification", SPEECH, "speech"),
}  # fmt: skip


def text(count: int, length: int, mask: bool) -> dict[str, Tensor]:
    found = {"input_ids": torch.randint(3, 99, (count, length))}
    if mask:
        found["attention_mask"] = torch.ones(count, length, dtype=torch.long)
        found["attention_mask"][0, length - 2 :] = 0
    return found


def inputs_of(kind: str) -> Sequence[Batch]:
    sizes = ((4, 12), (3, 10))
    if kind == "image":
        return [{"pixel_values": torch.randn(count, 3, 16, 16)} for count, _ in sizes]
    if kind == "speech":
        return [{"input_values": torch.randn(count, 200)} for count, _ in sizes]
    if kind == "pair":
        return [
            {**text(count, length, True), "decoder_input_ids": torch.randint(3, 99, (count, length - 3))}
            for count, length in sizes
        ]
    return [text(count, length, kind == "text") for count, length in sizes]


def maker(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """What makes the model of that type; it needs the transformers library."""

    def make() -> nn.Module:
        import transformers

        head, sizes, _ = ARCHITECTURES[kind]
        config = transformers.AutoConfig.for_model(kind, **sizes, **settings)
        model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
        return model.train()

    return make
