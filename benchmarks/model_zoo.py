"""Models by the dozen, each cut in two: in stages they compute what they compute alone, or are refused.

    python benchmarks/model_zoo.py [--only bert --only vit] [--seconds 120] [--write docs/models.md]

Models of the transformers library from tiny configurations, all other settings at their defaults, image
models in the manner of torchvision, and models written to be trained wrong. Each is trained for three steps
of two microbatches (flush, in one process, stage after stage) and evaluated, in float64, and compared with
the plain model: right (all within 1e-9 of the largest value), refused (with what sentence), WRONG, or crash.
Exit status 1 when there is any of the last two. `VERDICTS` are what is asked of each model; further ones may
be added.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError
from plait.profiler.trace import trace
from plait.runtime.evaluate import as_arguments, evaluation_mode
from plait.runtime.staged import Choices, StagedModel
from plait.runtime.verify import Checked, Example, prepare_stages
from plait.verification import same_random_numbers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hard_models import HARD
from support.vision_models import VISION

TOLERANCE = 1e-9
Batch = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, two batches of inputs, and the layer in front of which it is cut (the middle by default)."""

    family: str
    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], Sequence[Batch]]
    place: str = ""


@dataclass(frozen=True)
class Verdict:
    word: str
    sentence: str
    seconds: float


# Models of transformers: what becomes of them is asked with these sizes and no other setting.

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
            "mobilebert",
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


def from_transformers() -> Iterator[Case]:
    with contextlib.suppress(ImportError):
        import transformers

        for kind, (head, sizes, inputs) in ARCHITECTURES.items():

            def make(kind: str = kind, head: str = head, sizes: dict[str, Any] = sizes) -> nn.Module:
                config = transformers.AutoConfig.for_model(kind, **sizes)
                model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
                return model.train()

            yield Case("transformers", kind, make, lambda inputs=inputs: inputs_of(inputs))  # type: ignore[misc]


def cases() -> list[Case]:
    found = list(from_transformers())
    found += [Case("image", name, make, batches) for name, (make, batches) in VISION.items()]
    found += [Case("hard", name, make, batches, place) for name, (make, batches, place) in HARD.items()]
    return found


# What is asked of each.


def loss_of(output: Any, target: Any) -> Tensor:
    """A loss of whatever a model returns: of its logits, or of all its tensors."""
    if isinstance(output, dict) and "logits" in output:
        output = output["logits"]
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    losses = [((t.double() - 0.3) ** 2).mean() for t in tensors]
    return torch.stack(losses).sum()


def prepare(case: Case, model: nn.Module, batches: Sequence[Batch]) -> Checked:
    """The model in two stages, verified as a run would be."""
    first, second = batches
    traced = trace(model, first, others=[second], evaluation=False)
    ids = [layer.id for layer in traced.layers]
    at = ids.index(case.place) if case.place in ids else len(ids) // 2
    return prepare_stages(
        traced,
        (ids[:at], ids[at:]),
        lambda whole: trace(model, first, others=[second], whole=whole, before=traced),
        Example([(first, None), (second, None)], loss_of),
    )


def pipeline_verdict(case: Case) -> tuple[str, str]:
    """Whether the model in two stages under flush is the model alone; the word and a sentence."""
    torch.manual_seed(0)
    model = case.make().double()
    batches = [_double(batch) for batch in case.batches()]
    try:
        checked = prepare(case, model, batches)
        staged = StagedModel(checked.traced, checked.stages, loss_of, Choices())
        return compare(copy.deepcopy(model), staged, batches, checked.notes)
    except InputError as failure:
        return "refused", str(failure)


def compare(
    plain: nn.Module, staged: StagedModel, batches: Sequence[Batch], notes: Sequence[str]
) -> tuple[str, str]:
    for step in range(3):
        plain.zero_grad()
        staged.drop_gradients()
        for place, batch in enumerate(batches):
            with same_random_numbers(10 * step + place):
                arguments = as_arguments(batch)
                output = plain(**arguments) if isinstance(arguments, dict) else plain(*arguments)
                loss_of(output, None).backward()
            with same_random_numbers(10 * step + place):
                found, _ = staged.step(batch, None)
            apart = _apart(_tensors(output), _tensors(found))
            if apart > TOLERANCE:
                return "WRONG", f"the output of step {step} is off by {apart:.2g}"
        grads = staged.gradients()
        for name, parameter in plain.named_parameters():
            found_grad, expected = grads.get(name), parameter.grad
            if (found_grad is None) != (expected is None):
                return "WRONG", f"the gradient of {name} is {'none' if found_grad is None else 'not none'}"
            if (
                found_grad is not None
                and expected is not None
                and _apart([expected], [found_grad]) > TOLERANCE
            ):
                return "WRONG", f"the gradient of {name} at step {step} is wrong"
        _update(plain, staged)
    for batch in batches:
        arguments = as_arguments(batch)
        with same_random_numbers(7), torch.no_grad(), evaluation_mode(plain):
            output = plain(**arguments) if isinstance(arguments, dict) else plain(*arguments)
        with same_random_numbers(7):
            found = staged.evaluate(batch)
        if _apart(_tensors(output), _tensors(found)) > TOLERANCE:
            return "WRONG", "an evaluation is off"
    held = {name: buffer for _, name, buffer in staged.buffers()}
    for name, buffer in plain.named_buffers():
        if name in held and _apart([buffer], [held[name]]) > TOLERANCE:
            return "WRONG", f"buffer {name} is wrong after three steps"
    return "right", "; ".join(notes)


def _update(plain: nn.Module, staged: StagedModel, rate: float = 0.01) -> None:
    """One step of gradient descent of both; what several stages hold gets the sum of their gradients."""
    grads = staged.gradients()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
        for stage in staged.stages:
            seen: set[int] = set()
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                grad = grads[stage.first_names[name]]
                if grad is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameter.sub_(grad, alpha=rate)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _apart(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    if [t.shape for t in expected] != [t.shape for t in found]:
        return float("inf")
    worst = 0.0
    for one, other in zip(expected, found):
        if one.numel():
            a, b = one.double(), other.double()
            finite = a.isfinite() & b.isfinite()
            if not torch.equal(a[~finite].nan_to_num(1.0), b[~finite].nan_to_num(1.0)):
                return float("inf")
            scale = max(1.0, float(a[finite].abs().max()) if finite.any() else 1.0)
            worst = max(worst, float((a[finite] - b[finite]).abs().max()) / scale if finite.any() else 0.0)
    return worst


def _double(batch: Batch) -> Any:
    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(convert, batch)


VERDICTS: dict[str, Callable[[Case], tuple[str, str]]] = {"pipeline": pipeline_verdict}


class _TooLong(BaseException):
    pass


def judge(case: Case, verdict: Callable[[Case], tuple[str, str]], seconds: int) -> Verdict:
    """The verdict on a case; whatever else leaves the code is a crash."""

    def stop(*_: Any) -> None:
        raise _TooLong

    started = time.perf_counter()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            word, sentence = verdict(case)
    except _TooLong:
        word, sentence = "crash", f"not done after {seconds} s"
    except Exception as failure:  # anything but a refusal in words
        word, sentence = "crash", f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Verdict(word, sentence, time.perf_counter() - started)


def table(rows: Sequence[tuple[Case, dict[str, Verdict]]]) -> str:
    """The verdicts as Markdown, a column for each that was asked."""
    asked = list(VERDICTS)
    lines = [f"| model | {' | '.join(asked)} | |", f"| --- | {' | '.join('---' for _ in asked)} | --- |"]
    for family, title in (
        ("transformers", "**transformers, tiny configurations**"),
        ("image", "**image models**"),
        ("hard", "**written to be trained wrong**"),
    ):
        own = [(case, found) for case, found in rows if case.family == family]
        if own:
            lines.append(f"| {title} |{' |' * len(asked)} |")
        for case, found in own:
            words = " | ".join(found[name].word for name in asked)
            sentences = [found[name].sentence for name in asked if found[name].sentence]
            lines.append(f"| {case.name} | {words} | {_plain('; '.join(sentences))} |")
    return "\n".join(lines)


def _plain(sentence: str) -> str:
    """A sentence without the folders of this machine."""
    return re.sub(r"/[^\s`]+/", "", " ".join(sentence.split())).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="models of these names")
    parser.add_argument("--family", action="append", default=[], help="transformers, image, hard")
    parser.add_argument("--seconds", type=int, default=120, help="of one model at most")
    parser.add_argument("--write", type=Path, help="put the table into this file, below its heading")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rows = []
    for case in cases():
        if (asked.only and case.name not in asked.only) or (asked.family and case.family not in asked.family):
            continue
        found = {name: judge(case, verdict, asked.seconds) for name, verdict in VERDICTS.items()}
        rows.append((case, found))
        for name, each in found.items():
            print(
                f"{case.family:13} {case.name:18} {name:9} {each.word:8} {each.seconds:6.1f} s  "
                f"{each.sentence[:300]}",
                flush=True,
            )
    counts = Counter(each.word for _, found in rows for each in found.values())
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    if asked.write is not None:
        head = asked.write.read_text().partition("<!-- table -->")[0]
        asked.write.write_text(f"{head}<!-- table -->\n\n{table(rows)}\n")
    return 1 if counts["WRONG"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
