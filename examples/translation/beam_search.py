"""Beam search with the length and coverage penalties of GNMT (Wu et al., 2016, section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.core.errors import InputError
from translation.vocabulary import BEGIN, END, PAD

MOST_HYPOTHESES, MOST_PENALTY = 1000, 10


@dataclass(frozen=True)
class BeamOptions:
    """`size` hypotheses per sentence; the two penalties, off at 0; and the length limits.

    A translation has at most `longest` tokens, including its end, or `longest_ratio` times those of the
    source plus ten, whichever is less.
    """

    size: int = 5
    length_penalty: float = 0.6
    coverage_penalty: float = 0.1
    longest: int = 150
    longest_ratio: float = 3.0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MOST_HYPOTHESES:
            raise InputError(f"beam: found {self.size}, expected 1 to {MOST_HYPOTHESES}")
        for name in ("length_penalty", "coverage_penalty"):
            if not 0 <= getattr(self, name) <= MOST_PENALTY:
                raise InputError(f"{name}: found {getattr(self, name):g}, expected 0 to {MOST_PENALTY}")


class Translator(Protocol):
    """A model that computes the next token's logits step by step."""

    def encode(self, source_bs: Tensor) -> Any: ...

    def step(self, previous_b: Tensor, encoded: Any, states: Any) -> tuple[Tensor, Tensor, Any]: ...


def length_penalty(length: Tensor | int, alpha: float) -> Any:
    """The divisor of a log probability: 1 for one token, larger for more."""
    return ((5 + length) / 6) ** alpha


def coverage_penalty(attention_ns: Tensor, is_padding_ns: Tensor, beta: float) -> Tensor:
    """The penalty for source tokens whose attention, summed over all steps, is less than one."""
    # A token without any attention would make the penalty infinite.
    share = attention_ns.clamp(1e-10, 1.0).log().masked_fill(is_padding_ns, 0.0)
    return beta * share.sum(-1)


@torch.no_grad()
def beam_search(model: Translator, source_bs: Tensor, options: BeamOptions) -> list[list[int]]:
    """The best translation found of each source sentence, without its end."""
    encoded = model.encode(source_bs)
    search = Hypotheses(source_bs, options)
    encoded = encoded.rows(search.sentence_n)
    states: Any = None
    while not search.done:
        logits_nv, attention_ns, states = model.step(search.last_n, encoded, states)
        rows_n = search.advance(logits_nv, attention_ns)
        states = [tuple(part.index_select(1, rows_n) for part in layer) for layer in states]
    return search.best()


class Hypotheses:
    """The hypotheses of all sentences: `size` rows each, with their tokens, log probabilities and attention.

    A finished hypothesis is stored separately with its score, and its row is used for another.
    """

    def __init__(self, source_bs: Tensor, options: BeamOptions) -> None:
        sentences, time = source_bs.shape
        size, device = options.size, source_bs.device
        self._options = options
        self._sentences = sentences
        self._ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(sentences)]
        self.sentence_n = torch.arange(sentences, device=device).repeat_interleave(size)
        self._is_padding_ns = (source_bs == PAD).index_select(0, self.sentence_n)
        lengths = (~self._is_padding_ns).sum(-1)
        self._longest_n = (lengths * options.longest_ratio + 10).long().clamp(max=options.longest)
        self._tokens_nt = torch.full((sentences * size, 1), BEGIN, device=device)
        # At the first step all rows of a sentence are equal; only one of them may continue.
        begin = torch.full((sentences, size), -torch.inf, device=device)
        begin[:, 0] = 0.0
        self._log_p_bk = begin
        self._attention_ns = torch.zeros(sentences * size, time, device=device)

    @property
    def last_n(self) -> Tensor:
        return self._tokens_nt[:, -1]

    @property
    def done(self) -> bool:
        """Whether no unfinished hypothesis can still win."""
        return not bool(self._log_p_bk.isfinite().any())

    def advance(self, logits_nv: Tensor, attention_ns: Tensor) -> Tensor:
        """Add a token to the best hypotheses; returns the row from which each of them continues."""
        size, vocabulary = self._options.size, logits_nv.shape[-1]
        log_p_nv = logits_nv.float().log_softmax(-1)
        log_p_nv[:, [PAD, BEGIN]] = -torch.inf
        self._attention_ns = self._attention_ns + attention_ns
        total_bkv = self._log_p_bk.unsqueeze(-1) + log_p_nv.view(self._sentences, size, vocabulary)
        # Each row may end, so twice as many candidates always contain enough that continue.
        count = min(2 * size, size * vocabulary)
        best_bc, place_bc = total_bkv.flatten(1).topk(count)
        first_row_b1 = torch.arange(self._sentences, device=place_bc.device).unsqueeze(1) * size
        row_bc, token_bc = first_row_b1 + place_bc // vocabulary, place_bc % vocabulary
        self._keep_ended(best_bc, row_bc, token_bc)
        return self._go_on(best_bc, row_bc, token_bc)

    def _keep_ended(self, best_bc: Tensor, row_bc: Tensor, token_bc: Tensor) -> None:
        # An end counts only if it is among the best `size`.
        size = self._options.size
        ended = (token_bc[:, :size] == END) & best_bc[:, :size].isfinite()
        length = self._tokens_nt.shape[1]
        for sentence, column in ended.nonzero().tolist():
            row = int(row_bc[sentence, column])
            score = self._score(float(best_bc[sentence, column]), row, length)
            self._ended[sentence].append((score, self._tokens_nt[row, 1:].tolist()))

    def _score(self, log_p: float, row: int, length: int) -> float:
        covered = coverage_penalty(
            self._attention_ns[row], self._is_padding_ns[row], self._options.coverage_penalty
        )
        return log_p / float(length_penalty(length, self._options.length_penalty)) + float(covered)

    def _go_on(self, best_bc: Tensor, row_bc: Tensor, token_bc: Tensor) -> Tensor:
        size = self._options.size
        best_bc = best_bc.masked_fill(token_bc == END, -torch.inf)
        self._log_p_bk, chosen_bk = best_bc.topk(size)
        rows_n = row_bc.gather(1, chosen_bk).flatten()
        tokens_n1 = token_bc.gather(1, chosen_bk).view(-1, 1)
        self._tokens_nt = torch.cat([self._tokens_nt.index_select(0, rows_n), tokens_n1], 1)
        self._attention_ns = self._attention_ns.index_select(0, rows_n)
        self._drop_the_beaten()
        return rows_n

    def _drop_the_beaten(self) -> None:
        """End the search of sentences whose hypotheses are too long, or cannot beat a finished one."""
        length = self._tokens_nt.shape[1]
        longest_b = self._longest_n[:: self._options.size].tolist()
        for sentence, ended in enumerate(self._ended):
            is_over = length > longest_b[sentence]
            if is_over or (ended and self._is_beaten(sentence, longest_b[sentence])):
                if not ended:
                    self._take_unfinished(sentence)
                self._log_p_bk[sentence] = -torch.inf

    def _is_beaten(self, sentence: int, longest: int) -> bool:
        """Whether an upper bound of the final score is below the best so far."""
        bound = float(self._log_p_bk[sentence].max()) / float(
            length_penalty(longest, self._options.length_penalty)
        )
        return max(score for score, _ in self._ended[sentence]) >= bound

    def _take_unfinished(self, sentence: int) -> None:
        row = sentence * self._options.size + int(self._log_p_bk[sentence].argmax())
        self._ended[sentence].append((-torch.inf, self._tokens_nt[row, 1:].tolist()))

    def best(self) -> list[list[int]]:
        """The tokens of each sentence's best hypothesis."""
        return [max(ended, key=lambda scored: scored[0])[1] for ended in self._ended]
