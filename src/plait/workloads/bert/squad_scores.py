"""Exact match and F1 as SQuAD 2.0's official script defines them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from plait.core.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_scores(gold: Mapping[str, Sequence[str]], found: Mapping[str, str]) -> dict[str, float]:
    """Means in percent over all questions, by id; a question without gold answers has none.

    `has_answer_f1` and `no_answer_f1` are those of the two kinds of questions, where there are some.
    """
    missing = [id_ for id_ in gold if id_ not in found]
    if missing:
        raise DataError(
            f"{len(missing)} questions, first {missing[0]!r}, have no answer; give each one, perhaps empty"
        )
    exact = {id_: _best(exact_match, answers, found[id_]) for id_, answers in gold.items()}
    overlap = {id_: _best(f1, answers, found[id_]) for id_, answers in gold.items()}
    with_answer = [overlap[id_] for id_, answers in gold.items() if _wanted(answers) != [""]]
    without = [overlap[id_] for id_, answers in gold.items() if _wanted(answers) == [""]]
    scores = {"exact_match": _percent(list(exact.values())), "f1": _percent(list(overlap.values()))}
    if with_answer and without:
        scores |= {"has_answer_f1": _percent(with_answer), "no_answer_f1": _percent(without)}
    return scores


def exact_match(gold: str, found: str) -> float:
    """1 where the two are the same but for case, punctuation, articles and blanks."""
    return float(normalised(gold) == normalised(found))


def f1(gold: str, found: str) -> float:
    """The harmonic mean of the shares of words that the two have in common; all or nothing for no answer."""
    own, other = normalised(gold).split(), normalised(found).split()
    if not own or not other:
        return float(own == other)
    same = sum((Counter(own) & Counter(other)).values())
    return 2 * same / (len(own) + len(other))


def normalised(answer: str) -> str:
    """In lower case, without punctuation and articles, and with single blanks."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _wanted(answers: Sequence[str]) -> list[str]:
    """The gold answers that count; no answer where nothing is left of them."""
    return [answer for answer in answers if normalised(answer)] or [""]


def _best(score: Callable[[str, str], float], answers: Sequence[str], found: str) -> float:
    return max(score(answer, found) for answer in _wanted(answers))


def _percent(values: Sequence[float]) -> float:
    return 100.0 * sum(values) / len(values)
