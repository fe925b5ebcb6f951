"""Two text files with one sentence per line, such as WMT's: tokenised, with byte-pair codes."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.stored import Split
from translation.bpe import read_codes
from translation.encoding import Encoding, learn_encoding
from translation.lines import read_lines
from translation.pairs import SentenceGroups, SentencePairs, arrange
from translation.vocabulary import UNKNOWN, count_vocabulary, read_vocabulary

_WHAT = "sentences, one a line"
_REMEDY = "set data.path, data.train, data.test, data.source and data.target to PATH/TRAIN.SOURCE and so on"


def translation(
    split: Split,
    path: str,
    source: str = "en",
    target: str = "de",
    train: str = "train",
    test: str = "test",
    reference: str | None = None,
    codes: str | None = None,
    vocabulary: str | None = None,
    merges: int | None = None,
    vocabulary_size: int | None = None,
    tokenised: bool = True,
    longest: int = 50,
    sentences: int | None = None,
    tokens: int | None = None,
) -> SentencePairs | SentenceGroups:
    """The pairs of `path`/`train`.`source` and `path`/`train`.`target`, or those of `test`.

    `codes` and `vocabulary` name files below `path`, as subword-nmt writes them. Without codes the text must
    already be in pieces, unless `merges` says how many to learn; the default vocabulary is that of the
    training text, with at most `vocabulary_size` tokens. Training skips pairs longer than `longest`.
    `reference` names the test set's target as ordinary text; by default it is decoded from the tokens.
    """
    if codes is not None and merges is not None:
        raise DataError("data: found both codes and merges, expected at most one of them")
    if merges is not None and vocabulary is not None:
        raise DataError("data: found both merges, which learn a vocabulary, and vocabulary; leave one out")
    folder = Path(path).expanduser()
    prefix = folder / (train if split == "train" else test)
    texts = _read_pair(prefix, source, target)
    learns = vocabulary is None or merges is not None
    to_learn_from = texts if split == "train" or not learns else _read_pair(folder / train, source, target)
    encoding = _encoding(folder, to_learn_from, codes, vocabulary, merges, vocabulary_size, tokenised)
    references = None if split == "train" else _references(folder, reference, texts)
    pairs = SentencePairs(*texts, encoding, references)
    _check_known(pairs, prefix)
    return arrange(pairs, sentences, tokens, longest if split == "train" else None)


def _read_pair(prefix: Path, source: str, target: str) -> tuple[list[str], list[str]]:
    paths = [prefix.with_name(f"{prefix.name}.{language}") for language in (source, target)]
    first, second = (read_lines(path, _WHAT, _REMEDY) for path in paths)
    if len(first) != len(second):
        shorter, longer = sorted(zip((len(first), len(second)), paths), key=lambda counted: counted[0])
        raise DataError(
            f"{longer[1]}, line {shorter[0] + 1:,}: it has no partner: {shorter[1].name} has {shorter[0]:,} "
            f"lines, {longer[1].name} {longer[0]:,}; expected equally many, line by line translations of "
            f"each other; look for a line that was lost or broken in two"
        )
    for path, lines in zip(paths, (first, second)):
        empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
        if empty is not None:
            raise DataError(
                f"{path}, line {empty:,}: found an empty line, expected a sentence; remove this line from "
                f"both files (Moses' clean-corpus-n.perl does that)"
            )
    return first, second


def _encoding(
    path: Path,
    texts: tuple[list[str], list[str]],
    codes: str | None,
    vocabulary: str | None,
    merges: int | None,
    vocabulary_size: int | None,
    tokenised: bool,
) -> Encoding:
    both = [text for side in texts for text in side]
    if merges is not None:
        if merges < 1:
            raise DataError(f"data.merges: found {merges}, expected at least 1")
        return learn_encoding(both, merges, vocabulary_size, tokenised)
    read = None if codes is None else read_codes(path / codes)
    if vocabulary is not None:
        return Encoding(read_vocabulary(path / vocabulary), read, tokenised)
    bare = Encoding(count_vocabulary(()), read, tokenised)
    return Encoding(count_vocabulary((bare.tokens(text) for text in both), vocabulary_size), read, tokenised)


def _references(path: Path, reference: str | None, texts: tuple[list[str], list[str]]) -> list[str] | None:
    if reference is None:
        return None
    lines = read_lines(path / reference, _WHAT, "set data.reference to the target text as people write it")
    if len(lines) != len(texts[0]):
        raise DataError(
            f"{path / reference}, line {min(len(lines), len(texts[0])) + 1:,}: found {len(lines):,} lines, "
            f"but the test set has {len(texts[0]):,} sentences; expected one line for each"
        )
    return lines


def _check_known(pairs: SentencePairs, prefix: Path) -> None:
    """Raise if most tokens of the first sentences are unknown: the vocabulary belongs to another text."""
    looked_at = range(min(len(pairs), 200))
    tokens = unknown = 0
    for index in looked_at:
        (_, before), _ = pairs[index]
        tokens += len(before) - 1
        unknown += int((before == UNKNOWN).sum())
    if unknown > tokens / 2:
        raise DataError(
            f"{prefix}: {unknown:,} of the first {tokens:,} target tokens are not in the vocabulary of "
            f"{pairs.vocabulary:,}; is data.vocabulary of another text, or is data.codes missing?"
        )
