"""Pairs of sentences as data sets: a sample is a pair, or a group of pairs of similar length."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.stored import Fingerprinted
from translation.beam_search import BeamOptions
from translation.bleu import pad_rows, score, translate
from translation.encoding import Encoding
from translation.vocabulary import BEGIN, END, PAD

# How many starting points are tried for example batches.
_TRIES = 100
# (source, previous target tokens) and the target.
Pair = tuple[tuple[Tensor, Tensor], Tensor]


class SentencePairs(Fingerprinted):
    """Sentences of two languages by index, padded at the end in a batch.

    A text is encoded when it is read. Translations are compared with `references`, by default the decoded
    target texts.
    """

    def __init__(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        encoding: Encoding,
        references: Sequence[str] | None = None,
    ) -> None:
        self.encoding = encoding
        self.vocabulary = len(encoding.vocabulary)
        self._fingerprint = f"{encoding.checksum:08x}"
        self._sources = sources
        self._targets = targets
        self._references = references

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> Pair:
        target = self.encoding.numbers(self._targets[index])
        return (
            (torch.tensor(self.source_numbers(index)), torch.tensor([BEGIN, *target])),
            torch.tensor([*target, END]),
        )

    def collated_batch(self, indices: list[int]) -> Pair:
        return pad_pairs([self[index] for index in indices])

    def example_indices(self, sizes: Sequence[int]) -> list[list[int]]:
        """Samples for batches of these sizes whose lengths show which sizes change; see `choose_examples`."""
        return choose_examples(self, sizes)

    def source_numbers(self, index: int) -> list[int]:
        """The token numbers of the source sentence."""
        return [*self.encoding.numbers(self._sources[index]), END]

    def source_text(self, index: int) -> str:
        return self._sources[index]

    def reference(self, index: int) -> str:
        """The target sentence as ordinary text."""
        if self._references is not None:
            return self._references[index]
        return self.encoding.text(self.encoding.numbers(self._targets[index]))

    def lengths(self) -> Any:
        """The number of tokens of the longer side of each pair, including begin or end."""
        tokens = self.encoding.tokens
        both = zip(self._sources, self._targets)
        return np.array([1 + max(len(tokens(a)), len(tokens(b))) for a, b in both], dtype=np.int64)

    def scores(
        self,
        model: Any,
        device: torch.device,
        beam: int = 5,
        length_penalty: float = 0.6,
        coverage_penalty: float = 0.1,
    ) -> dict[str, float]:
        """The BLEU of the model's translations by beam search, printed by `plait evaluate`."""
        translations = translate(
            model,
            [self.source_numbers(index) for index in range(len(self))],
            BeamOptions(beam, length_penalty, coverage_penalty),
            device,
        )
        references = [self.reference(index) for index in range(len(self))]
        return score([self.encoding.text(each) for each in translations], references)

    def only(self, indices: Sequence[int]) -> SentencePairs:
        """Only these pairs."""
        references = None if self._references is None else [self._references[i] for i in indices]
        return SentencePairs(
            [self._sources[i] for i in indices],
            [self._targets[i] for i in indices],
            self.encoding,
            references,
        )


def pad_pairs(samples: list[Pair]) -> Pair:
    """A batch of pairs, each side as long as its longest sentence."""
    sources, previous, targets = zip(*((source, before, target) for (source, before), target in samples))
    return (pad_rows(sources), pad_rows(previous)), pad_rows(targets)


class SentenceGroups(Fingerprinted):
    """Groups of pairs of similar length; a sample is a group, so that a batch has little padding.

    A batch is (groups, sentences, tokens), padded to its largest group and longest sentence. The groups are
    the same in all epochs; their order changes.
    """

    def __init__(self, pairs: SentencePairs, groups: Sequence[Sequence[int]]) -> None:
        self.pairs = pairs
        self.vocabulary = pairs.vocabulary
        self.scores = pairs.scores
        self._fingerprint = pairs.fingerprint()
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Pair:
        return self.pairs.collated_batch(list(self._groups[index]))

    def collated_batch(self, indices: list[int]) -> Pair:
        groups = [self[index] for index in indices]
        sources, previous, targets = zip(*((source, before, target) for (source, before), target in groups))
        return (_stacked(sources), _stacked(previous)), _stacked(targets)

    def example_indices(self, sizes: Sequence[int]) -> list[list[int]]:
        """Samples for batches of these sizes whose lengths show which sizes change; see `choose_examples`."""
        return choose_examples(self, sizes)


def choose_examples(dataset: SentencePairs | SentenceGroups, sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive samples for each batch: the first ones whose lengths show which sizes change.

    Tracing treats sizes that are equal in all examples as one size, or as fixed, and a size of 1 as fixed: so
    the sources of the batches must have different lengths, the targets too, the two must differ, and groups
    must have several sentences.
    """
    examples: list[list[int]] = []
    for begin in range(min(len(dataset), _TRIES)):
        ends = itertools.accumulate(sizes, initial=begin)
        examples = [[i % len(dataset) for i in range(a, b)] for a, b in itertools.pairwise(ends)]
        shapes = [_sizes_of(dataset.collated_batch(numbers)) for numbers in examples]
        rows, sources, targets = zip(*shapes)
        unlike = all(len(set(lengths)) == len(lengths) for lengths in (sources, targets))
        if unlike and 1 not in rows and len({rows, sources, targets}) == 3:
            return examples
    return examples


def _sizes_of(batch: Pair) -> tuple[int, int, int]:
    """The number of sentences of a group, or -1, and the lengths of both sides."""
    (source, previous), _ = batch
    return source.shape[1] if source.dim() == 3 else -1, source.shape[-1], previous.shape[-1]


def _stacked(groups: Sequence[Tensor]) -> Tensor:
    rows, time = (max(group.shape[axis] for group in groups) for axis in (0, 1))
    stacked = torch.full((len(groups), rows, time), PAD, dtype=torch.long)
    for number, group in enumerate(groups):
        stacked[number, : group.shape[0], : group.shape[1]] = group
    return stacked


def arrange(
    pairs: SentencePairs, sentences: int | None, tokens: int | None, longest: int | None = None
) -> SentencePairs | SentenceGroups:
    """`pairs` without those longer than `longest` tokens, one by one or in groups.

    A group has `sentences` sentences, or at most `tokens` tokens, padding included.
    """
    for name, value in {"sentences": sentences, "tokens": tokens, "longest": longest}.items():
        if value is not None and value < 1:
            raise DataError(f"data.{name}: found {value}, expected at least 1")
    if sentences is not None and tokens is not None:
        raise DataError("data: found both sentences and tokens, expected at most one of them")
    if sentences is None and tokens is None and longest is None:
        return pairs
    lengths = pairs.lengths()
    if longest is not None:
        # The lengths include begin or end.
        kept = np.flatnonzero(lengths <= longest + 1)
        if len(kept) == 0:
            raise DataError(
                f"data.longest: found {longest}, but the shortest of {len(pairs):,} pairs has "
                f"{lengths.min() - 1:,} tokens; expected a larger one"
            )
        pairs, lengths = pairs.only(kept.tolist()), lengths[kept]
    if sentences is None and tokens is None:
        return pairs
    return SentenceGroups(pairs, group_by_length(lengths, sentences, tokens))


def group_by_length(lengths: Any, sentences: int | None, tokens: int | None) -> list[list[int]]:
    """Pairs in groups, shuffled; a pair longer than `tokens` is a separate group."""
    groups: list[list[int]] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        last = groups[-1] if groups else []
        # In increasing order the current pair is the longest, so the group is padded to its length.
        full = len(last) == sentences or (tokens is not None and (len(last) + 1) * lengths[index] > tokens)
        if not last or full:
            groups.append([index])
        else:
            last.append(index)
    # The first groups must be typical, as models are profiled with them.
    random.Random(0).shuffle(groups)
    return groups


def is_test(text: str, fraction: float) -> bool:
    """Whether a sentence is in the `fraction` for testing, by a hash of its text."""
    return zlib.crc32(text.encode()) < fraction * 2**32
