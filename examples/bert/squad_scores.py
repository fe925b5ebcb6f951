"""Exact match and F1 as SQuAD 2.0's official script defines them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from plait.core.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_scores(gold: Mapping[str, Sequence[str]], predicted: Mapping[str, str]) -> dict[str, float]:
    """Means in percent over all questions, by id; a question without gold answers has none.

    `has_answer_f1` and `no_answer_f1` are those of the two kinds of questions, if there are any.
    """
    missing = [id_ for id_ in gold if id_ not in predicted]
    if missing:
        raise DataError(
            f"{len(missing)} questions, first {missing[0]!r}, have no answer; give each one, perhaps empty"
        )
    exact = {id_: _best(exact_match, answers, predicted[id_]) for id_, answers in gold.items()}
    overlap = {id_: _best(f1, answers, predicted[id_]) for id_, answers in gold.items()}
    with_answer = [overlap[id_] for id_, answers in gold.items() if _wanted(answers) != [""]]
    without = [overlap[id_] for id_, answers in gold.items() if _wanted(answers) == [""]]
    scores = {"exact_match": _percent(list(exact.values())), "f1": _percent(list(overlap.values()))}
    if with_answer and without:
        scores |= {"has_answer_f1": _percent(with_answer), "no_answer_f1": _percent(without)}
    return scores


def exact_match(gold: str, predicted: str) -> float:
    """1 if the two are equal except for case, punctuation, articles and whitespace."""
    return float(normalised(gold) == normalised(predicted))


def f1(gold: str, predicted: str) -> float:
    """The harmonic mean of precision and recall of words; all or nothing for no answer."""
    gold_words, predicted_words = normalised(gold).split(), normalised(predicted).split()
    if not gold_words or not predicted_words:
        return float(gold_words == predicted_words)
    same = sum((Counter(gold_words) & Counter(predicted_words)).values())
    return 2 * same / (len(gold_words) + len(predicted_words))


def normalised(answer: str) -> str:
    """The answer in lower case, without punctuation and articles, and with single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def _wanted(answers: Sequence[str]) -> list[str]:
    """The gold answers that are not empty after normalisation; an empty answer if there are none."""
    return [answer for answer in answers if normalised(answer)] or [""]


def _best(score: Callable[[str, str], float], answers: Sequence[str], predicted: str) -> float:
    return max(score(answer, predicted) for answer in _wanted(answers))


def _percent(values: Sequence[float]) -> float:
    return 100.0 * sum(values) / len(values)
