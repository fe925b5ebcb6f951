"""SQuAD for BERT: windows of question and text as samples, and answers as text from the model's output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bert.squad_file import Answer, Question, read_squad
from bert.squad_scores import squad_scores
from bert.word_pieces import SPECIAL, Piece, WordPieces, read_pieces
from plait.core.errors import DataError
from plait.workloads.data.stored import Fingerprinted, Split

FILES: dict[Split, str] = {"train": "train-v2.0.json", "test": "dev-v2.0.json"}
SquadSample = tuple[dict[str, Tensor], Tensor]


def squad(
    split: Split,
    path: str,
    vocabulary_file: str,
    length: int = 384,
    stride: int = 128,
    question_length: int = 64,
    longest_answer: int = 30,
) -> SquadWindows:
    """`path/train-v2.0.json`, or `dev-v2.0.json` for testing, as windows of `length` tokens.

    A text longer than a window has several windows, `stride` tokens apart. `vocabulary_file` is a file of
    word pieces. A sample is a dict of the model's arguments, and the begin and end of the answer (0, 0 if the
    window has none).
    """
    questions = read_squad(Path(path).expanduser() / FILES[split])
    pieces = read_pieces(Path(vocabulary_file).expanduser())
    return SquadWindows(questions, pieces, _Sizes(length, stride, question_length, longest_answer))


def synthetic_squad(
    split: Split, questions: int = 64, length: int = 48, stride: int = 16, seed: int = 0
) -> SquadWindows:
    """Questions of the same form about made-up texts; every fifth has no answer.

    Each text assigns numbers to some letters, and a question asks for one of them.
    """
    draw = random.Random(2 * seed + (split == "test"))
    letters, numbers = "abcdefghijklmnopqrstuvwxyz", [str(n) for n in range(10, 100)]
    pieces = WordPieces([*SPECIAL, *letters, *numbers, "has", "what", ".", "?"])
    made = [_made_up(draw, f"made-up-{i}", letters, numbers, i % 5 == 4) for i in range(questions)]
    return SquadWindows(made, pieces, _Sizes(length, stride, 8, 4))


def _made_up(
    draw: random.Random, id_: str, letters: str, numbers: Sequence[str], impossible: bool
) -> Question:
    named = draw.sample(letters, 9)
    facts = [(letter, draw.choice(numbers)) for letter in named[:8]]
    context = " ".join(f"{letter} has {number}." for letter, number in facts)
    letter, number = (named[8], "") if impossible else draw.choice(facts)
    begin = context.find(f"{letter} has {number}.") + len(letter) + 5
    answers = () if impossible else (Answer(number, begin),)
    return Question(id_, f"what has {letter}?", context, answers)


@dataclass(frozen=True)
class _Sizes:
    """Numbers of tokens: of a window, between windows, at most of a question, and at most of an answer."""

    length: int
    stride: int
    question: int
    answer: int

    def __post_init__(self) -> None:
        if min(self.stride, self.question, self.answer) < 1 or self.length < self.question + 4:
            raise DataError(
                f"data.length: found windows of {self.length} tokens, {self.stride} apart, with questions of "
                f"{self.question} and answers of {self.answer} at most; expected at least 1 each, and a "
                f"window that has room for a question and 4 tokens more"
            )


@dataclass(frozen=True)
class Window:
    """One question with a part of its text: pieces `begin` to `end` of it, from token `at` of the window."""

    question: int
    begin: int
    end: int
    at: int


class SquadWindows(Fingerprinted):
    """Samples ({arguments}, (begin, end)), one per window; `scores` are those of the official script."""

    def __init__(self, questions: Sequence[Question], pieces: WordPieces, sizes: _Sizes) -> None:
        self.questions = list(questions)
        self.vocabulary = len(pieces)
        self._fingerprint = pieces.id
        self.input_shape = (sizes.length,)
        self._pieces, self._sizes = pieces, sizes
        self._asked = [pieces.encode(question.text)[: sizes.question] for question in questions]
        self._texts: dict[str, list[Piece]] = {}
        for question in questions:
            if question.context not in self._texts:
                self._texts[question.context] = pieces.encode(question.context)
        self.windows = [window for number in range(len(self.questions)) for window in self._windows(number)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> SquadSample:
        window, pieces, length = self.windows[index], self._pieces, self._sizes.length
        text = self._texts[self.questions[window.question].context][window.begin : window.end]
        asked = [piece.number for piece in self._asked[window.question]]
        tokens = [pieces.first, *asked, pieces.separator, *(piece.number for piece in text), pieces.separator]
        padding = length - len(tokens)
        begin, end = self._span(window, text)
        arguments = {
            "input_ids": tokens + [pieces.pad] * padding,
            "attention_mask": [1] * len(tokens) + [0] * padding,
            "token_type_ids": [0] * window.at + [1] * (len(tokens) - window.at) + [0] * padding,
        }
        found = {name: torch.tensor(values) for name, values in arguments.items()}
        ends = {"start_positions": torch.tensor(begin), "end_positions": torch.tensor(end)}
        return found | ends, torch.tensor([begin, end])

    def _windows(self, number: int) -> list[Window]:
        at = len(self._asked[number]) + 2
        room = self._sizes.length - at - 1
        count = len(self._texts[self.questions[number].context])
        begins = [0]
        while begins[-1] + room < count:
            begins.append(begins[-1] + min(self._sizes.stride, room))
        return [Window(number, begin, min(begin + room, count), at) for begin in begins]

    def _span(self, window: Window, text: Sequence[Piece]) -> tuple[int, int]:
        """The tokens of the first answer within the window; the first token, twice, if it is not in it."""
        answers = self.questions[window.question].answers
        inside = [
            position
            for position, piece in enumerate(text)
            if answers and piece.begin < answers[0].end and piece.end > answers[0].begin
        ]
        if not inside or text[inside[0]].begin > answers[0].begin or text[inside[-1]].end < answers[0].end:
            return 0, 0
        return window.at + inside[0], window.at + inside[-1]

    @torch.no_grad()
    def answers(self, model: nn.Module, device: torch.device, batch_size: int = 32) -> dict[str, str]:
        """The model's answer to each question by id, empty if there is none; in evaluation mode."""
        was_training = model.training
        model.eval()
        best: dict[int, tuple[float, str]] = {}
        no_answer: dict[int, float] = {}
        for first in range(0, len(self), batch_size):
            numbers = range(first, min(first + batch_size, len(self)))
            batch = torch.utils.data.default_collate([self[n][0] for n in numbers])
            output = model(**{name: value.to(device) for name, value in batch.items()})
            for n, starts, ends in zip(numbers, output.start_logits.cpu(), output.end_logits.cpu()):
                window = self.windows[n]
                none = float(starts[0] + ends[0])
                no_answer[window.question] = min(none, no_answer.get(window.question, none))
                candidate = self._best_span(window, starts, ends)
                best[window.question] = max(
                    candidate, best.get(window.question, candidate), key=lambda f: f[0]
                )
        model.train(was_training)
        return {
            self.questions[number].id: text if score > no_answer[number] else ""
            for number, (score, text) in best.items()
        }

    def _best_span(self, window: Window, starts: Tensor, ends: Tensor) -> tuple[float, str]:
        """The score and text of the best span within the text's part of a window."""
        count = window.end - window.begin
        if count == 0:
            return float("-inf"), ""
        inside = slice(window.at, window.at + count)
        together = starts[inside].unsqueeze(1) + ends[inside].unsqueeze(0)
        allowed = torch.ones_like(together, dtype=torch.bool).triu().tril(self._sizes.answer - 1)
        flat = together.masked_fill(~allowed, float("-inf")).flatten()
        index = int(flat.argmax())
        question = self.questions[window.question]
        text = self._texts[question.context]
        begin = text[window.begin + index // count].begin
        end = text[window.begin + index % count].end
        return float(flat[index]), question.context[begin:end]

    def scores(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Exact match and F1, in percent, over all questions; printed by `plait evaluate`."""
        gold = {question.id: [answer.text for answer in question.answers] for question in self.questions}
        return squad_scores(gold, self.answers(model, device))
