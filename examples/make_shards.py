"""BERT's pre-training shards from plain text: sentence pairs with masked tokens, and a vocabulary of pieces.

    python examples/make_shards.py corpus.txt --to data/shards --vocabulary 4000 --length 128

A text has a sentence a line and an empty line between documents, as BERT's own scripts take it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from tokenizers import models, trainers

from bert.shards import VOCABULARY_FILE
from bert.word_pieces import SPECIAL, WordPieces, read_pieces, uncased
from hdf5 import Array
from plait.cli.os_errors import os_errors_as_messages
from plait.core.errors import DataError, PlaitError
from plait.core.files import write_atomic
from plait.workloads.data.files import decode_text, read_bytes

Document = list[list[int]]
_REMEDY = "give a text in UTF-8, a sentence a line, with an empty line between documents"


@dataclass(frozen=True)
class ShardSettings:
    """What samples look like: `length` tokens, of which `masked` at most, and 15%, are to be guessed."""

    length: int = 128
    masked: int = 20
    shards: int = 8
    test_fraction: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Pair:
    """A sample: tokens of two sentences, which places are masked, and what stood there."""

    tokens: list[int]
    second_at: int
    places: list[int]
    masked: list[int]
    is_other: bool


def make_shards(
    texts: Sequence[Path],
    folder: Path,
    vocabulary: int | Path = 8000,
    settings: ShardSettings | None = None,
) -> dict[str, int]:
    """Write `folder/training/*.hdf5`, `folder/test/*.hdf5` and `folder/vocab.txt`; returns how much of each.

    `vocabulary` is a file of word pieces, or how many to build from the texts. The result depends on the
    texts and the settings alone.
    """
    settings = settings or ShardSettings()
    _check(settings)
    if old := sorted(folder.rglob("*.hdf5")):
        raise DataError(f"{old[0]}: {folder} has shards already; choose another folder, or remove them")
    words = folder / VOCABULARY_FILE
    given = vocabulary if isinstance(vocabulary, Path) and vocabulary.exists() else None
    is_given = given is not None and words.exists() and words.samefile(given)
    if words.exists() and not is_given:
        raise DataError(
            f"{words}: there already, and not written by this; choose another folder, or use it: "
            f"--vocabulary {words}"
        )
    lines = [line for text in texts for line in (*_lines(text), "")]
    if isinstance(vocabulary, Path):
        pieces = read_pieces(vocabulary)
    else:
        pieces = WordPieces(build_vocabulary(lines, vocabulary))
    documents = list(_documents(lines, pieces))
    if sum(len(document) for document in documents) < 2:
        raise DataError(f"{texts[0]}: found fewer than two sentences; {_REMEDY}")
    draw = random.Random(settings.seed)
    pairs = [pair for i in range(len(documents)) for pair in _pairs(documents, i, pieces, settings, draw)]
    draw.shuffle(pairs)
    tests = round(len(pairs) * settings.test_fraction)
    _write(folder / "test", pairs[:tests], max(1, settings.shards // 8), pieces, settings)
    _write(folder / "training", pairs[tests:], settings.shards, pieces, settings)
    if not is_given:
        write_atomic(words, "\n".join(pieces.pieces) + "\n")
    return {"vocabulary": len(pieces), "training": len(pairs) - tests, "test": tests}


def build_vocabulary(lines: Sequence[str], size: int) -> list[str]:
    """At most `size` pieces of the words in `lines`; the same for the same lines, in any order."""
    tokenizer = uncased(models.WordPiece(unk_token="[UNK]"))
    letters = Counter(
        letter
        for line in lines
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(line))
        for letter in word
    )
    if not letters:
        raise DataError("the text has no words to build a vocabulary of; give one with some")
    # A letter has a piece where it begins a word, and one where it continues one; the rarest go if need be.
    room = (size - len(SPECIAL)) // 2
    if room < 1:
        raise DataError(f"vocabulary: found {size}, expected at least {len(SPECIAL) + 2} pieces")
    kept = sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:room])
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        # Letters are named here in order, so that of equally frequent pairs the same one is joined each time.
        special_tokens=[*SPECIAL, *kept, *(f"##{letter}" for letter in kept)],
        initial_alphabet=kept,
        limit_alphabet=len(kept),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    numbers = tokenizer.get_vocab(with_added_tokens=False)
    return sorted(numbers, key=lambda piece: numbers[piece])


def _check(settings: ShardSettings) -> None:
    if settings.length < 8:
        raise DataError(f"length: found {settings.length}, expected at least 8 tokens")
    if settings.masked < 1 or settings.shards < 1:
        raise DataError(
            f"masked: found {settings.masked} masked tokens and {settings.shards} shards, expected 1 at least"
        )
    if not 0 <= settings.test_fraction < 1:
        raise DataError(f"test_fraction: found {settings.test_fraction}, expected 0 or more and less than 1")


def _lines(path: Path) -> list[str]:
    return decode_text(path, read_bytes(path, "a text file", _REMEDY), _REMEDY).splitlines()


def _documents(lines: Sequence[str], pieces: WordPieces) -> Iterator[Document]:
    document: Document = []
    for line in lines:
        sentence = [piece.number for piece in pieces.encode(line)]
        if sentence:
            document.append(sentence)
        elif document:
            yield document
            document = []


def _pairs(
    documents: Sequence[Document],
    number: int,
    pieces: WordPieces,
    settings: ShardSettings,
    draw: random.Random,
) -> Iterator[Pair]:
    """Sentences of a document in samples: as many as fit, then half the time not what follows them."""
    document, room, at = documents[number], settings.length - 3, 0
    while at < len(document):
        end, tokens = at, 0
        while end < len(document) and tokens + len(document[end]) <= room:
            tokens, end = tokens + len(document[end]), end + 1
        end = max(end, at + 1)
        middle = draw.randint(at + 1, max(at + 1, end - 1))
        first = [token for sentence in document[at:middle] for token in sentence]
        second = [token for sentence in document[middle:end] for token in sentence]
        is_other = not second or draw.random() < 0.5
        if is_other:
            # What was to follow is used in the next sample.
            second, end = _elsewhere(documents, number, middle, draw), middle
        _trim(first, second, room, draw)
        yield _masked(first, second, is_other, pieces, settings, draw)
        at = end


def _elsewhere(documents: Sequence[Document], number: int, after: int, draw: random.Random) -> list[int]:
    """A sentence of another document, or of another place where there is one document only."""
    others = [i for i in range(len(documents)) if i != number]
    document = documents[draw.choice(others)] if others else documents[number]
    places = [i for i in range(len(document)) if others or i != after] or [0]
    return list(document[draw.choice(places)])


def _trim(first: list[int], second: list[int], room: int, draw: random.Random) -> None:
    """Cut tokens off the longer of the two, at either end, until both fit."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if draw.random() < 0.5 else -1)


def _masked(
    first: list[int], second: list[int], is_other: bool, pieces: WordPieces, settings: ShardSettings,
    draw: random.Random,
) -> Pair:  # fmt: skip
    """15% of the tokens are to be guessed: 80% of these are hidden, 10% replaced, 10% left as they are."""
    tokens = [pieces.first, *first, pieces.separator, *second, pieces.separator]
    candidates = [i for i, token in enumerate(tokens) if token not in (pieces.first, pieces.separator)]
    count = min(settings.masked, max(1, round(len(candidates) * 0.15)))
    places = sorted(draw.sample(candidates, count))
    masked = [tokens[place] for place in places]
    for place in places:
        chance = draw.random()
        if chance < 0.8:
            tokens[place] = pieces.mask
        elif chance < 0.9:
            tokens[place] = draw.randrange(len(SPECIAL), len(pieces))
    return Pair(tokens, len(first) + 2, places, masked, is_other)


def _write(
    folder: Path, pairs: Sequence[Pair], shards: int, pieces: WordPieces, settings: ShardSettings
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards = min(shards, len(pairs))
    for number in range(shards):
        own = pairs[len(pairs) * number // shards : len(pairs) * (number + 1) // shards]
        with h5py.File(folder / f"shard_{number:04d}.hdf5", "w") as file:
            for key, rows in _arrays(own, pieces, settings).items():
                file.create_dataset(key, data=rows, compression="gzip")


def _arrays(pairs: Sequence[Pair], pieces: WordPieces, settings: ShardSettings) -> dict[str, Array]:
    count, length = len(pairs), settings.length
    found: dict[str, Array] = {
        "input_ids": np.full((count, length), pieces.pad, np.int32),
        "input_mask": np.zeros((count, length), np.int8),
        "segment_ids": np.zeros((count, length), np.int8),
        "masked_lm_positions": np.zeros((count, settings.masked), np.int32),
        "masked_lm_ids": np.zeros((count, settings.masked), np.int32),
        "next_sentence_labels": np.array([pair.is_other for pair in pairs], np.int8),
    }
    for row, pair in enumerate(pairs):
        found["input_ids"][row, : len(pair.tokens)] = pair.tokens
        found["input_mask"][row, : len(pair.tokens)] = 1
        found["segment_ids"][row, pair.second_at : len(pair.tokens)] = 1
        found["masked_lm_positions"][row, : len(pair.places)] = pair.places
        found["masked_lm_ids"][row, : len(pair.masked)] = pair.masked
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "texts", nargs="+", type=Path, help="a sentence a line, an empty line between documents"
    )
    parser.add_argument("--to", required=True, type=Path, help="the folder to write")
    parser.add_argument("--vocabulary", default="8000", help="how many word pieces to build, or a vocab.txt")
    parser.add_argument("--length", default=128, type=int, help="tokens of a sample")
    parser.add_argument("--masked", default=20, type=int, help="most masked tokens of a sample")
    parser.add_argument("--shards", default=8, type=int, help="files to write for training")
    parser.add_argument("--test-fraction", default=0.05, type=float, help="share of the samples to test with")
    parser.add_argument(
        "--seed", default=0, type=int, help="of what is masked and which sentences are paired"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    settings = ShardSettings(given.length, given.masked, given.shards, given.test_fraction, given.seed)
    vocabulary = int(given.vocabulary) if given.vocabulary.isdecimal() else Path(given.vocabulary)
    try:
        with os_errors_as_messages():
            found = make_shards(given.texts, given.to, vocabulary, settings)
    except PlaitError as failure:
        print(failure, file=sys.stderr)
        sys.exit(2)
    if given.json:
        print(json.dumps({"folder": str(given.to), **found}))
        return
    print(
        f"{found['training']:,} samples to train with and {found['test']:,} to test with, "
        f"{found['vocabulary']:,} word pieces"
    )
    print(
        f"wrote {given.to}; next: plait train examples/bert-pretraining.yaml --set data.path={given.to} "
        f"--set model_args.vocabulary={found['vocabulary']}"
    )


if __name__ == "__main__":
    main()
