"""GNMT: its size as published, padding that changes nothing, one token at a time as all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plait_bench
from plait.core.errors import JobError
from plait.graph import pipedream
from plait.workloads.translation.gnmt import Gnmt, gnmt8, gnmt16, gnmt_tiny, reversed_positions
from plait.workloads.translation.loss import label_smoothing, token_accuracy
from translation.vocabulary import BEGIN, END, PAD

PROFILES = Path(plait_bench.__file__).parent / "profiles"
# The gain and the bias of the normalised attention, which PipeDream's model does not have.
NORMALISATION = 1 + 1024


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def without_memory(make, **options) -> int:
    with torch.device("meta"):
        return count(make(**options))


def tiny(layers: int = 3) -> Gnmt:
    torch.manual_seed(0)
    return gnmt_tiny(vocabulary=11, width=6, layers=layers).double()


SHORT, LONG = [5, 6, END], [7, 8, 9, 10, 4, END]


def batch(*rows: list[int]) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def test_gnmt8_has_the_parameters_of_the_mlperf_entry():
    assert without_memory(gnmt8) == 160_671_297


def test_both_sizes_have_the_parameters_of_the_graphs_that_pipedream_published():
    graph = pipedream.read(PROFILES / "gnmt.txt").graph()
    published = sum(node.parameter_bytes for node in graph.nodes) / 4
    assert without_memory(gnmt8, shared_embedding=False) == published + NORMALISATION
    # Summed over its gnmt_large/graph.txt, 1,110,870,272 bytes.
    assert without_memory(gnmt16, shared_embedding=False) == 277_717_568 + NORMALISATION
    assert without_memory(gnmt16) == 244_622_913


def test_a_sentence_alone_gives_what_it_gives_in_a_padded_batch():
    model = tiny()
    previous = torch.tensor([[BEGIN, 5, 4]])
    alone = model(torch.tensor([SHORT]), previous)
    beside = model(batch(SHORT, LONG), batch([BEGIN, 5, 4], [BEGIN, 6, 7, 8, 9]))
    assert torch.allclose(beside[:1, :3], alone, atol=1e-12)


def test_padding_adds_nothing_to_loss_and_gradients():
    model = tiny()
    pairs = [(SHORT, [BEGIN, 5, 4], [5, 4, END]), (LONG, [BEGIN, 6, 7, 8, 9], [6, 7, 8, 9, END])]

    def gradients(source, previous, target):
        model.zero_grad()
        label_smoothing(model(source, previous), target).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    together = gradients(*(batch(*side) for side in zip(*pairs)))
    apart = [gradients(*(batch(side) for side in pair)) for pair in pairs]
    assert torch.allclose(together, sum(apart) / 2, atol=1e-12)


def test_a_group_of_sentences_gives_what_its_rows_give():
    model = tiny()
    source, previous = batch(SHORT, LONG), batch([BEGIN, 5], [BEGIN, 6, 7])
    # The second group has one sentence less: a row of padding.
    grouped_source = torch.stack([source, batch(LONG, [PAD] * 6)])
    grouped_previous = torch.stack([previous, batch([BEGIN, 6, 7], [PAD] * 3)])
    found = model(grouped_source, grouped_previous)
    assert found.shape == (2, 2, 3, 11)
    assert torch.allclose(found[0], model(source, previous), atol=1e-12)
    assert torch.allclose(found[1, :1], model(batch(LONG), batch([BEGIN, 6, 7])), atol=1e-12)
    assert found.isfinite().all()


def test_one_token_after_the_other_gives_what_all_at_once_give():
    model = tiny()
    source, previous = batch(SHORT, LONG), torch.tensor([[BEGIN, 5, 6, 7], [BEGIN, 9, 8, 4]])
    encoded, states = model.encode(source), None
    for place in range(4):
        logits, attention, states = model.step(previous[:, place], encoded, states)
        assert torch.allclose(logits, model(source, previous)[:, place], atol=1e-12)
        assert torch.allclose(attention.sum(-1), torch.ones(2, dtype=torch.float64))
        assert attention[0, 3:].abs().max() == 0


def test_a_sentence_is_turned_around_in_its_own_length():
    assert reversed_positions(batch(SHORT, LONG) == PAD).tolist() == [[2, 1, 0, 3, 4, 5], [5, 4, 3, 2, 1, 0]]


def test_the_loss_of_a_batch_is_the_mean_of_its_parts():
    torch.manual_seed(0)
    output, target = torch.randn(3, 4, 11), batch([5, 6, 7, END], [5, END], [END])
    parts = [label_smoothing(output[i : i + 1], target[i : i + 1]) for i in range(3)]
    assert torch.isclose(label_smoothing(output, target), sum(parts) / 3)
    assert torch.isclose(label_smoothing(output, target, tokens_per_sample=7.0), sum(parts) / 21)
    with pytest.raises(JobError, match="expected the target to have the output's shape"):
        label_smoothing(output, target[:, :2])


def test_only_tokens_count_for_accuracy():
    target = batch([5, 6, END], [END])
    output = torch.nn.functional.one_hot(torch.tensor([[5, 4, END], [END, PAD, PAD]]), 11).float()
    assert [int(number) for number in token_accuracy(output, target)] == [3, 4]
