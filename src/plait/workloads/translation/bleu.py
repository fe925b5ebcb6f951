"""BLEU of a model's translations: sentences in, text as people write it out, scored by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.workloads.data.sentences.pairs import SentenceGroups, SentencePairs, pad_rows
from plait.workloads.translation.beam_search import BeamOptions, Translator, beam_search

# Sentences that are translated together.
_AT_ONCE = 64


@dataclass(frozen=True)
class BleuScore:
    """BLEU from 0 to 100; the words of the translations by those of the references; and what was computed."""

    bleu: float
    length_ratio: float
    signature: str


def find_pairs(dataset: Any) -> SentencePairs | None:
    """The pairs of sentences of a data set; None where it holds others."""
    found = dataset.pairs if isinstance(dataset, SentenceGroups) else dataset
    return found if isinstance(found, SentencePairs) else None


def translates(model: Any) -> bool:
    """Whether a model gives its tokens one after the other, as a search needs it."""
    return callable(getattr(model, "encode", None)) and callable(getattr(model, "step", None))


def translate(
    model: Translator, pairs: SentencePairs, options: BeamOptions, device: torch.device
) -> list[str]:
    """The translation of every source sentence, in order; the model must be in evaluation mode."""
    sources = [pairs.source_numbers(index) for index in range(len(pairs))]
    by_length = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    texts = [""] * len(sources)
    for begin in range(0, len(sources), _AT_ONCE):
        chosen = by_length[begin : begin + _AT_ONCE]
        rows = pad_rows([torch.tensor(sources[index]) for index in chosen])
        for index, numbers in zip(chosen, beam_search(model, rows.to(device), options)):
            texts[index] = pairs.encoding.text(numbers)
    return texts


def score(translations: Sequence[str], references: Sequence[str]) -> BleuScore:
    """The corpus BLEU of `translations`, with sacrebleu's own tokens and its signature."""
    from sacrebleu.metrics.bleu import BLEU  # loads what only a scoring process needs

    metric = BLEU()
    found = metric.corpus_score(list(translations), [list(references)])
    return BleuScore(found.score, found.ratio, str(metric.get_signature()))
