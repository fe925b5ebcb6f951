"""Beam search against all translations there are, on a model so small that they can be listed."""

from __future__ import annotations

import itertools

import pytest
import torch

from plait.workloads.data.sentences.vocabulary import BEGIN, END, PAD, UNKNOWN
from plait.workloads.translation.beam_search import (
    BeamOptions,
    beam_search,
    coverage_penalty,
    length_penalty,
)
from plait.workloads.translation.gnmt import Gnmt, gnmt_tiny

LONGEST = 4
TOKENS = (UNKNOWN, 4, 5)
SOURCE = torch.tensor([[5, 4, 4, END], [4, END, PAD, PAD], [5, 5, END, PAD]])


def model(seed: int) -> Gnmt:
    torch.manual_seed(seed)
    made = gnmt_tiny(vocabulary=6, width=4)
    # Unlike translations must have unlike scores.
    for parameter in made.parameters():
        parameter.data.mul_(3.0)
    return made.eval()


@torch.no_grad()
def all_scores(model: Gnmt, source: torch.Tensor, options: BeamOptions) -> dict[tuple[int, ...], float]:
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


@pytest.mark.parametrize("penalties", [(0.0, 0.0), (0.6, 0.0), (1.0, 0.3)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_beam_that_holds_everything_finds_the_best_of_all_translations(seed, penalties):
    options, made = BeamOptions(60, *penalties, longest=LONGEST), model(seed)
    found = beam_search(made, SOURCE, options)
    for number, source in enumerate(SOURCE.split(1)):
        scores = all_scores(made, source, options)
        assert tuple(found[number]) == max(scores, key=scores.__getitem__)


def test_the_penalties_change_what_is_best():
    options = [BeamOptions(60, *penalties, longest=LONGEST) for penalties in ((0.0, 0.0), (1.0, 0.3))]
    lengths = [
        sum(len(found) for seed in range(6) for found in beam_search(model(seed), SOURCE, each))
        for each in options
    ]
    assert lengths[0] < lengths[1]


def test_a_beam_of_one_takes_the_best_token_each_time():
    made = model(0)
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
    together = beam_search(model(1), SOURCE, options)
    assert together == [beam_search(model(1), row[:, row[0] != PAD], options)[0] for row in SOURCE.split(1)]


def test_a_translation_that_never_ends_is_cut():
    made = model(0)
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
