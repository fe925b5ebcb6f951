"""Three fused trials of every architecture against the same trials alone: right, refused, or wrong.

    python benchmarks/model_zoo_fused.py [names...]

Each architecture of transformers is built from a tiny configuration, in float64 and without dropout, as torch
alone would draw other numbers, three times with different weights. Fused with verification, the trials take
steps of SGD on batches of their own; their weights must be those of each model alone with torch's optimizer.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from plait.core.errors import PlaitError
from plait.fusion import FusedOptimizer, fuse

TRIALS = 3
STEPS = 3
TOLERANCE = 1e-9
LR = 0.05


@dataclass(frozen=True)
class Verdict:
    """What became of an architecture: fused, by parts, refused or wrong; `detail` says where or why."""

    name: str
    state: str
    detail: str
    worst: float
    seconds: float


class Wrapped(nn.Module):
    """A model of transformers that takes its first input by place and returns what it predicts."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model, self.key = model, key

    def forward(self, x: Tensor) -> Tensor:
        given = {self.key: x}
        if getattr(self.model.config, "is_encoder_decoder", False) and self.key == "input_ids":
            given["decoder_input_ids"] = x
        found = self.model(**given)
        return found.logits if hasattr(found, "logits") else found.last_hidden_state


def judge(name: str, make: Callable[[], nn.Module], batch: Callable[[int], Tensor]) -> Verdict:
    """Fuse three of these models, train them, and compare each with itself alone."""
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        models = [make().double() for _ in range(TRIALS)]
        batches = [[batch(TRIALS * step + trial) for trial in range(TRIALS)] for step in range(STEPS)]
        lone = [_alone(model, [step[trial] for step in batches]) for trial, model in enumerate(models)]
    except Exception as failure:  # a model that does not run alone in float64 says nothing about fusion
        return Verdict(name, "not run", f"alone: {_line(failure)}", 0.0, time.perf_counter() - start)
    try:
        fused = fuse(models, verify=[batches[0][0], batches[1][0]]).train()
        together = _together(fused, batches)
    except PlaitError as failure:
        return Verdict(name, "refused", _line(failure), 0.0, time.perf_counter() - start)
    except Exception as failure:  # what must not happen: an error that is not ours
        return Verdict(name, "CRASH", _line(failure), 0.0, time.perf_counter() - start)
    worst = max(_apart(one, other) for one, other in zip(together, lone))
    parts = ", ".join(part or "the whole model" for part in fused.unfused)
    state = "WRONG" if not worst <= TOLERANCE else "by parts" if parts else "fused"
    return Verdict(name, state, parts, worst, time.perf_counter() - start)


def _alone(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x in batches:
        optimizer.zero_grad()
        _loss(model(x)).backward()
        optimizer.step()
    return dict(model.state_dict())


def _together(fused: Any, batches: Sequence[Sequence[Tensor]]) -> list[dict[str, Tensor]]:
    optimizer = FusedOptimizer(fused, "sgd", lr=LR)
    for step in batches:
        optimizer.zero_grad()
        torch.stack([_loss(own) for own in fused(torch.stack(list(step)))]).sum().backward()
        optimizer.step()
    return [dict(model.state_dict()) for model in fused.split()]


def _loss(output: Tensor) -> Tensor:
    return (output - torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).square().sum(-1).mean()


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    worst = 0.0
    for key, value in other.items():
        if value.is_floating_point() and value.numel():
            scale = 1.0 + value.abs().max().item()
            worst = max(worst, (one[key] - value).abs().max().item() / scale)
    return worst


def _line(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:160]


def zoo() -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]]:
    """The architectures, by name: how to make one, and the batch of a number."""
    import transformers as T

    T.logging.set_verbosity_error()
    bert = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert |= {"max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    llama = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama |= {"num_key_value_heads": 1, "max_position_embeddings": 24, "attention_dropout": 0.0}
    gpt = {"n_positions": 24, "n_embd": 8, "n_layer": 2, "n_head": 2}
    gpt |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    vit = {k: v for k, v in bert.items() if k != "max_position_embeddings"}
    vit |= {"image_size": 8, "patch_size": 4, "num_channels": 3}
    bart = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    bart |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0}
    bart |= {"max_position_embeddings": 24, "attention_dropout": 0.0, "activation_dropout": 0.0}
    words = {"vocab_size": 17, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    no_drop = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

    def ids(number: int) -> Tensor:
        return torch.randint(3, 17, (2, 6), generator=torch.Generator().manual_seed(number))

    def images(size: int) -> Callable[[int], Tensor]:
        def made(number: int) -> Tensor:
            generator = torch.Generator().manual_seed(number)
            return torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)

        return made

    def text(model: str, config: str, options: dict[str, Any]) -> Any:
        return lambda: Wrapped(getattr(T, model)(getattr(T, config)(**words, **options)), "input_ids")

    def vision(model: str, config: str, options: dict[str, Any]) -> Any:
        return lambda: Wrapped(getattr(T, model)(getattr(T, config)(**options)), "pixel_values")

    texts = {
        "BERT": ("BertForMaskedLM", "BertConfig", bert),
        "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", bert),
        "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", {**bert, "embedding_size": 8}),
        "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", {**bert, "embedding_size": 4}),
        "DeBERTa-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**bert, "relative_attention": True}),
        "MobileBERT": ("MobileBertForMaskedLM", "MobileBertConfig", {**bert, "embedding_size": 8,
                       "intra_bottleneck_size": 8}),
        "RoFormer": ("RoFormerForMaskedLM", "RoFormerConfig", {**bert, "embedding_size": 8}),
        "ESM": ("EsmForMaskedLM", "EsmConfig", {**bert, "mask_token_id": 3}),
        "FNet": ("FNetForMaskedLM", "FNetConfig", {k: bert[k] for k in ("hidden_size", "num_hidden_layers",
                 "intermediate_size", "max_position_embeddings", "hidden_dropout_prob")}),
        "DistilBERT": ("DistilBertForMaskedLM", "DistilBertConfig", {"dim": 8, "hidden_dim": 16,
                       "n_layers": 2, "n_heads": 2, "max_position_embeddings": 24, "dropout": 0.0,
                       "attention_dropout": 0.0}),
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", gpt),
        "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**gpt, "rotary_dim": 2}),
        "GPT-Neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {"hidden_size": 8, "num_layers": 2, "num_heads": 2,
                    "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 24,
                    "embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0}),
        "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"hidden_size": 8, "num_hidden_layers": 2,
                     "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 24,
                     **no_drop}),
        "GPT-BigCode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", gpt),
        "BLOOM": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 8, "n_layer": 2, "n_head": 2,
                  **no_drop}),
        "OPT": ("OPTForCausalLM", "OPTConfig", {"hidden_size": 8, "num_hidden_layers": 2, "ffn_dim": 16,
                "num_attention_heads": 2, "max_position_embeddings": 24, "dropout": 0.0,
                "word_embed_proj_dim": 8}),
        "Llama": ("LlamaForCausalLM", "LlamaConfig", llama),
        "Mistral": ("MistralForCausalLM", "MistralConfig", llama),
        "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", llama),
        "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**llama, "head_dim": 4}),
        "Phi": ("PhiForCausalLM", "PhiConfig", {**llama, "num_key_value_heads": 2, "resid_pdrop": 0.0,
                "embd_pdrop": 0.0}),
        "StableLM": ("StableLmForCausalLM", "StableLmConfig", {**llama, "hidden_dropout": 0.0}),
        "Falcon": ("FalconForCausalLM", "FalconConfig", {"hidden_size": 8, "num_hidden_layers": 2,
                   "num_attention_heads": 2, **no_drop}),
        "MPT": ("MptForCausalLM", "MptConfig", {"d_model": 8, "n_heads": 2, "n_layers": 2}),
        "Mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 8, "state_size": 4,
                  "num_hidden_layers": 1}),
        "T5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 8, "d_kv": 4, "d_ff": 16,
               "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
        "BART": ("BartForConditionalGeneration", "BartConfig", bart),
        "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", bart),
    }  # fmt: skip
    pictures = {
        "ViT": ("ViTForImageClassification", "ViTConfig", vit, 8),
        "DeiT": ("DeiTForImageClassification", "DeiTConfig", vit, 8),
        "BEiT": ("BeitForImageClassification", "BeitConfig", {**vit, "drop_path_rate": 0.0}, 8),
        "Swin": ("SwinForImageClassification", "SwinConfig", {"image_size": 8, "patch_size": 2,
                 "embed_dim": 4, "depths": [2], "num_heads": [2], "window_size": 2,
                 "drop_path_rate": 0.0}, 8),
        "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig", {"patch_size": 2, "num_stages": 2,
                     "hidden_sizes": [4, 8], "depths": [1, 1], "drop_path_rate": 0.0}, 8),
        "ResNet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 4, "depths": [1, 1],
                   "hidden_sizes": [4, 8], "layer_type": "basic"}, 16),
        "RegNet": ("RegNetForImageClassification", "RegNetConfig", {"embedding_size": 4, "depths": [1, 1],
                   "hidden_sizes": [4, 8], "groups_width": 4}, 16),
        "SegFormer": ("SegformerForImageClassification", "SegformerConfig", {"num_encoder_blocks": 2,
                      "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 8], "patch_sizes": [3, 3],
                      "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
                      "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}, 16),
        "PoolFormer": ("PoolFormerForImageClassification", "PoolFormerConfig", {"hidden_sizes": [4, 8],
                       "num_encoder_blocks": 2, "depths": [1, 1], "patch_sizes": [3, 3], "strides": [2, 2],
                       "padding": [1, 1], "mlp_ratio": 2.0, "drop_path_rate": 0.0}, 16),
    }  # fmt: skip
    found = {name: (text(*given), ids) for name, given in texts.items()}
    return found | {name: (vision(*given[:3]), images(given[3])) for name, given in pictures.items()}


def main(names: Sequence[str]) -> int:
    """Judge the architectures and print a table; the number of those that are wrong or crash."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    verdicts = []
    print(f"{'architecture':14} {'verdict':9} {'apart':>8} {'s':>5}  modules trial by trial, or why")
    for name, (make, batch) in zoo().items():
        if names and name not in names:
            continue
        found = judge(name, make, batch)
        verdicts.append(found)
        print(
            f"{name:14} {found.state:9} {found.worst:8.1e} {found.seconds:5.1f}  {found.detail}", flush=True
        )
    counts = {state: sum(v.state == state for v in verdicts) for state in sorted({v.state for v in verdicts})}
    print(f"{len(verdicts)} architectures: {counts}; torch {torch.__version__}")
    return sum(v.state in ("WRONG", "CRASH") for v in verdicts)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
