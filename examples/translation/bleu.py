"""BLEU of a model's translations: sentences as token numbers in and out, their text scored by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor

from translation.beam_search import BeamOptions, Translator, beam_search
from translation.vocabulary import PAD

# Sentences that are translated together.
_AT_ONCE = 64


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Sentences as the rows of one tensor, padded at their ends."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=PAD)


def translate(
    model: Translator, sources: Sequence[Sequence[int]], options: BeamOptions, device: torch.device
) -> list[Sequence[int]]:
    """The translation of every source sentence, in order; the model must be in evaluation mode."""
    by_length = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    translations: list[Sequence[int]] = [()] * len(sources)
    for begin in range(0, len(sources), _AT_ONCE):
        chosen = by_length[begin : begin + _AT_ONCE]
        rows = pad_rows([torch.tensor(sources[index]) for index in chosen])
        for index, numbers in zip(chosen, beam_search(model, rows.to(device), options)):
            translations[index] = numbers
    return translations


def score(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """sacrebleu's BLEU from 0 to 100, and the length ratio of translations to references."""
    bleu = BLEU().corpus_score(list(translations), [list(references)])
    return {"bleu": bleu.score, "length_ratio": bleu.ratio}
