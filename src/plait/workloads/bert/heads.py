"""BERT of the transformers library with the heads for pre-training and for SQuAD, and their metrics."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from plait.workloads.from_transformers import from_config
from plait.workloads.metrics import IGNORED, more_is_better

Size = Literal["base", "medium", "tiny"]
# Layers, heads and width: Devlin et al. (2019), Turc et al. (2019), and one for tests.
SIZES: dict[str, tuple[int, int, int]] = {
    "base": (12, 12, 768),
    "medium": (8, 8, 512),
    "tiny": (2, 2, 32),
}


def pretraining(
    size: Size = "base", vocabulary: int = 30522, context: int = 512, dropout: float = 0.1
) -> nn.Module:
    """`BertForPreTraining`: its loss is that of masked tokens plus that of the next sentence.

    Base has 110,106,428 parameters. Use it with samples of `examples/bert/shards.py`.
    """
    return from_config("BertForPreTraining", _config(size, vocabulary, context, dropout))


def question_answering(
    size: Size = "base", vocabulary: int = 30522, context: int = 512, dropout: float = 0.1
) -> nn.Module:
    """`BertForQuestionAnswering`: begin and end of an answer, as in `examples/bert/squad.py`."""
    return from_config("BertForQuestionAnswering", _config(size, vocabulary, context, dropout))


def _config(size: str, vocabulary: int, context: int, dropout: float) -> dict[str, Any]:
    layers, heads, width = SIZES[size]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": context,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


@more_is_better
def masked_accuracy(output: Any, labels: Tensor) -> tuple[Tensor, int]:
    """The number of correct masked tokens, and of all masked tokens; for `evaluate.metric`."""
    return (output.prediction_logits.argmax(-1) == labels).sum(), int((labels != IGNORED).sum())


@more_is_better
def span_accuracy(output: Any, span_b2: Tensor) -> tuple[Tensor, int]:
    """The number of windows with both ends of the answer correct, and of all windows."""
    begins = output.start_logits.argmax(-1) == span_b2[:, 0]
    return (begins & (output.end_logits.argmax(-1) == span_b2[:, 1])).sum(), len(span_b2)
