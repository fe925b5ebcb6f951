"""Beam search against all translations there are, on a model so small that they can be listed."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from plait.workloads.translation.gnmt import EncodedSource, Gnmt, gnmt_tiny
from translation.beam_search import (
    BeamOptions,
    beam_search,
    coverage_penalty,
    length_penalty,
)
from translation.vocabulary import BEGIN, END, PAD, UNKNOWN

LONGEST = 4
TOKENS = (UNKNOWN, 4, 5)
SOURCE = torch.tensor([[5, 4, 4, END], [4, END, PAD, PAD], [5, 5, END, PAD]])


class ByPrefix:
    """A model whose next token depends on all tokens before it and on the source, as if by chance.

    Its state is a number for the tokens so far, so one that is not moved with its hypothesis changes all.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def encode(self, source_bs: torch.Tensor) -> EncodedSource:
        is_padding = source_bs == PAD
        return EncodedSource(source_bs, source_bs, is_padding)

    def step(self, previous_b, encoded, states):
        before = torch.zeros(1, len(previous_b), 1, dtype=torch.long) if states is None else states[0][0]
        after = before * 7 + previous_b.view(1, -1, 1) + 1
        rows = [
            drawn(self.seed, code, tuple(source))
            for code, source in zip(after.flatten().tolist(), encoded.context_bsc.tolist())
        ]
        logits, attention = (torch.stack(parts) for parts in zip(*rows))
        return logits.clone(), attention, [(after,)]


@cache
def drawn(seed: int, code: int, source: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and attention after the tokens that `code` stands for."""
    mixed = (seed * 1009 + code) * 100_003 + sum(token * 11**place for place, token in enumerate(source))
    generator = torch.Generator().manual_seed(mixed)
    logits = torch.randn(6, generator=generator) * 2
    # The end is unlikely, so that long translations can win.
    logits[END] -= 1.5
    scores = torch.randn(len(source), generator=generator) * 2
    return logits, scores.masked_fill(torch.tensor(source) == PAD, -torch.inf).softmax(-1)


def gnmt(seed: int) -> Gnmt:
    torch.manual_seed(seed)
    return gnmt_tiny(vocabulary=6, width=4).eval()


@torch.no_grad()
def all_scores(model: Any, source: torch.Tensor, options: BeamOptions) -> dict[tuple[int, ...], float]:
    """The score of every translation of one sentence, those of a length at a time."""
    found = {}
    for length in range(LONGEST):
        translations = list(itertools.product(TOKENS, repeat=length))
        rows = torch.tensor([[BEGIN, *tokens, END] for tokens in translations])
        encoded, states = model.encode(source.expand(len(rows), -1)), None
        total, attention = torch.zeros(len(rows)), torch.zeros(len(rows), source.shape[1])
        for before, after in itertools.pairwise(rows.unbind(1)):
            logits, weights, states = model.step(before, encoded, states)
            total += logits.log_softmax(-1).gather(1, after.unsqueeze(1)).squeeze(1)
            attention += weights
        covered = coverage_penalty(attention, encoded.is_padding_bs, options.coverage_penalty)
        scores = total / length_penalty(length + 1, options.length_penalty) + covered
        found.update(zip(translations, scores.tolist()))
    return found


PENALTIES = [(0.0, 0.0), (0.6, 0.0), (1.0, 0.3)]


@pytest.mark.parametrize(
    "made", [gnmt(0), gnmt(3), *map(ByPrefix, range(4))], ids=lambda made: type(made).__name__
)
def test_a_beam_that_holds_everything_finds_the_best_of_all_translations(made):
    for penalties in PENALTIES:
        options = BeamOptions(60, *penalties, longest=LONGEST)
        found = beam_search(made, SOURCE, options)
        for number, source in enumerate(SOURCE.split(1)):
            scores = all_scores(made, source, options)
            assert tuple(found[number]) == max(scores, key=scores.__getitem__), (penalties, number)


def test_each_penalty_changes_what_is_best():
    found = [
        [
            beam_search(ByPrefix(seed), SOURCE, BeamOptions(60, *penalties, longest=LONGEST))
            for seed in range(6)
        ]
        for penalties in [(0.0, 0.0), (1.0, 0.0), (0.0, 0.3)]
    ]
    lengths = [sum(len(tokens) for each in rows for tokens in each) for rows in found]
    assert lengths[0] < lengths[1]
    assert lengths[0] < lengths[2]


def test_a_beam_of_one_takes_the_best_token_each_time():
    made = ByPrefix(0)
    (found,) = beam_search(made, SOURCE[:1], BeamOptions(1, 0.0, 0.0, longest=12))
    encoded, states, token, greedy = made.encode(SOURCE[:1]), None, torch.tensor([BEGIN]), []
    with torch.no_grad():
        while len(greedy) < 12:
            logits, _, states = made.step(token, encoded, states)
            logits[:, [PAD, BEGIN]] = -torch.inf
            token = logits.argmax(-1)
            if token == END:
                break
            greedy.append(int(token))
    assert found == greedy


def test_a_sentence_is_translated_alone_as_in_a_batch():
    options = BeamOptions(3, longest=10)
    made = gnmt(3)
    together = beam_search(made, SOURCE, options)
    assert together == [beam_search(made, row[:, row[0] != PAD], options)[0] for row in SOURCE.split(1)]


def test_a_translation_that_never_ends_is_cut():
    made = gnmt(0)
    made.decoder.classifier.bias.data[END] = -1e9
    (found,) = beam_search(made, SOURCE[:1], BeamOptions(2, longest=7))
    assert len(found) == 7


def test_the_penalties_are_those_of_the_paper():
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 0.5) == pytest.approx(2**0.5)
    attention = torch.tensor([[0.5, 2.0, 0.0]])
    padding = torch.tensor([[False, False, True]])
    assert float(coverage_penalty(attention, padding, 0.2)) == pytest.approx(
        0.2 * torch.tensor(0.5).log().item()
    )
