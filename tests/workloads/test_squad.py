"""SQuAD: its file, windows over long texts, answers as text, and the official scores."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bert.squad import synthetic_squad
from bert.squad_scores import exact_match, f1, normalised, squad_scores
from bert.word_pieces import SPECIAL
from plait.core.codec import encode
from plait.core.errors import DataError
from plait.jobs.evaluate import measure_run
from plait.launcher.run_dir import RunDir
from plait.schema.settings import DataSettings, EvaluateSettings, ModelSettings, OptimizerSettings
from plait.workloads.data import build
from support.training import digits_job, train_here

CONTEXT = "Norman knights came to the coast of France. They were led by Rollo, a Viking."
WORDS = "norman knights came to the coast of france . they were led by rollo , a viking where who what ?"


def question(number: int, text: str, answer: str | None) -> dict[str, Any]:
    found = [{"text": answer, "answer_start": CONTEXT.index(answer)}] if answer else []
    return {"id": f"q{number}", "question": text, "answers": found, "is_impossible": answer is None}


def write(folder: Path, *questions: dict[str, Any]) -> dict[str, str]:
    """The files of a small SQuAD, and the options that read it."""
    content = {
        "version": "v2.0",
        "data": [{"title": "Normans", "paragraphs": [{"context": CONTEXT, "qas": list(questions)}]}],
    }
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS.split()]) + "\n")
    return {"path": str(folder), "vocabulary_file": str(folder / "vocab.txt")}


def test_windows_hold_question_and_text_and_where_the_answer_is(tmp_path: Path) -> None:
    options = write(tmp_path, question(0, "Who led?", "Rollo, a Viking"), question(1, "What?", None))
    dataset = build("bert.squad:squad", "train", **options, length=32, question_length=8)
    assert len(dataset) == 2
    arguments, span = dataset[0]
    words = [*SPECIAL, *WORDS.split()]
    shown = [words[number] for number in arguments["input_ids"].tolist()]
    assert shown[:5] == ["[CLS]", "who", "led", "?", "[SEP]"]
    begin, end = span.tolist()
    assert shown[begin : end + 1] == ["rollo", ",", "a", "viking"]
    assert (arguments["start_positions"], arguments["end_positions"]) == (begin, end)
    used = int(arguments["attention_mask"].sum())
    assert shown[used - 1 : used + 1] == ["[SEP]", "[PAD]"]
    assert arguments["token_type_ids"].tolist() == [0] * 5 + [1] * (used - 5) + [0] * (32 - used)
    assert dataset[1][1].tolist() == [0, 0]


def test_a_long_text_has_several_windows_and_the_answer_lies_in_some(tmp_path: Path) -> None:
    options = write(tmp_path, question(0, "Who led?", "Rollo, a Viking"))
    dataset = build("bert.squad:squad", "train", **options, length=16, stride=4, question_length=4)
    assert [window.begin for window in dataset.windows] == [0, 4, 8]
    spans = [dataset[i][1].tolist() for i in range(3)]
    assert spans[0] == [0, 0]
    assert spans[2] != [0, 0]


class Oracle(nn.Module):
    """A model that names the span that its arguments name, or no answer for questions in `silent`."""

    def forward(self, **arguments: torch.Tensor) -> Any:
        ids = arguments["input_ids"]
        logits = [torch.zeros(ids.shape), torch.zeros(ids.shape)]
        for scores, name in zip(logits, ("start_positions", "end_positions")):
            scores.scatter_(1, arguments[name].unsqueeze(1), 5.0)
        return SimpleNamespace(start_logits=logits[0], end_logits=logits[1])


def test_answers_are_taken_from_the_text_across_windows_and_scored(tmp_path: Path) -> None:
    asked = [
        question(0, "Who led?", "Rollo, a Viking"),
        question(1, "What?", None),
        question(2, "Where?", "coast"),
    ]
    dataset = build(
        "bert.squad:squad", "test", **write(tmp_path, *asked), length=16, stride=4, question_length=4
    )
    model = Oracle()
    found = dataset.answers(model, torch.device("cpu"), batch_size=2)
    # A window that does not hold the answer says so; the lowest such score of a question counts.
    assert found == {"q0": "Rollo, a Viking", "q1": "", "q2": "coast"}
    assert dataset.scores(model, torch.device("cpu"))["f1"] == 100.0
    assert model.training


def test_scores_are_those_of_the_official_script() -> None:
    assert normalised("The  U.S.A., an  idea!") == "usa idea"
    assert exact_match("the cat", "Cat.") == 1.0
    assert f1("the black cat sat", "a cat") == pytest.approx(2 * (1 / 1) * (1 / 3) / (1 + 1 / 3))
    assert f1("cat", "") == f1("", "cat") == f1("cat", "dog") == 0.0
    assert f1("", "the") == 1.0
    gold = {"a": ["the cat", "black cat"], "b": [], "c": ["the"], "d": ["ship"]}
    scores = squad_scores(gold, {"a": "black cats", "b": "", "c": "", "d": "ships"})
    assert scores == {"exact_match": 50.0, "f1": 62.5, "has_answer_f1": 25.0, "no_answer_f1": 100.0}
    with pytest.raises(DataError, match="1 questions, first 'd', have no answer"):
        squad_scores(gold, {"a": "", "b": "", "c": ""})


def test_a_fine_tuned_run_is_evaluated_by_exact_match_and_f1(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    args = {"size": "tiny", "vocabulary": 128, "context": 48, "dropout": 0.0}
    kind = "bert.squad:synthetic_squad"
    job = digits_job(
        model=ModelSettings("plait.workloads.bert:question_answering", args),
        data=DataSettings(kind, 8, {"questions": 16, "length": 48}),
        loss="model",
        optimizer=OptimizerSettings("adam", {"lr": 0.002}),
        evaluate=EvaluateSettings(metric="plait.workloads.bert:span_accuracy"),
        precision="float32",
        steps=3,
    )
    folder = RunDir(tmp_path)
    result, _ = train_here(job, tmp_path)
    folder.settings.write_text(json.dumps(encode(job)))
    metrics = measure_run(folder)["metrics"]
    assert metrics["span_accuracy"] == pytest.approx(result.test["span_accuracy"])
    assert {"exact_match", "f1", "has_answer_f1", "no_answer_f1"} <= metrics.keys()
    assert 0 <= metrics["exact_match"] <= metrics["f1"] <= 100


def test_made_up_questions_have_their_answers_in_the_text() -> None:
    dataset = synthetic_squad("train", questions=10)
    for asked in dataset.questions:
        for answer in asked.answers:
            assert asked.context[answer.begin : answer.end] == answer.text
    assert [bool(asked.answers) for asked in dataset.questions] == ([True] * 4 + [False]) * 2


BAD_FILES = {
    "cut": (lambda text: text[: len(text) // 2], r"train-v2\.0\.json, line \d+: not JSON"),
    "list": (lambda text: "[1]", "the file: found a list, expected an object with 'data'"),
    "no data": (lambda text: text.replace('"data"', '"date"'), "found an object with date, version"),
    "no qas": (
        lambda text: text.replace('"qas"', '"questions"'),
        r"data\[0\]\.paragraphs\[0\]: found an object",
    ),
    "number": (
        lambda text: text.replace('"Who led?"', "7"),
        r"qas\[0\]\.question: found a int, expected text",
    ),
    "moved": (
        lambda text: text.replace('"answer_start": ', '"answer_start": 1'),
        r"answers\[0\]\.text: found 'Roll",
    ),
    "none": (lambda text: text.replace("answers", "answer"), r"expected one with 'answers'"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_malformed_file_is_refused_with_the_place(case: str, tmp_path: Path) -> None:
    options = write(tmp_path, question(0, "Who led?", "Rollo"))
    path = tmp_path / "train-v2.0.json"
    change, message = BAD_FILES[case]
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=f"{message}.*repair this one"):
        build("bert.squad:squad", "train", **options)


def test_windows_without_room_and_missing_files_are_refused(tmp_path: Path) -> None:
    options = write(tmp_path, question(0, "Who led?", "Rollo"))
    with pytest.raises(DataError, match="found windows of 20 tokens"):
        build("bert.squad:squad", "train", **options, length=20)
    with pytest.raises(DataError, match=r"train-v2\.0\.json: no such file"):
        build(
            "bert.squad:squad", "train", path=str(tmp_path / "x"), vocabulary_file=options["vocabulary_file"]
        )
