"""Mistakes in code of one's own are answered with what was found, what was expected and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plait.core.errors import DataError, InputError, JobError
from plait.core.names import resolve
from plait.schema.job import make_job
from plait.schema.settings import DataSettings, EvaluateSettings, ModelSettings
from plait.training import components
from plait.training.setup.data import build_train_data
from plait.training.setup.model import find_model
from support.training import digits_job, train_here

HERE = "test_own_code_mistakes"
a_model = nn.Linear(64, 10)
a_set = TensorDataset(torch.randn(8, 64), torch.zeros(8, dtype=torch.long))


def no_split() -> Any:
    return a_set


def split_last(path: str, split: str) -> Any:
    return a_set


def by_keyword(*, split: str) -> Any:
    return a_set


def batches(split: str) -> Any:
    return DataLoader(a_set, batch_size=4)


def both(split: str) -> Any:
    return a_set, a_set


def by_name(split: str) -> Any:
    return {"train": a_set, "test": a_set}


DATA = {
    "no_split": r"data\.kind: .*no_split takes no argument.*expected .*def no_split\(split\)",
    "by_keyword": r"data\.kind: .*by_keyword takes no argument by position",
    "split_last": r"data\.path: split_last has 'path' first, where it gets the split; .*split_last\(split",
    "batches": r"returned a DataLoader for 'train', expected the data set: .*loader\.dataset.*batch_size",
    "both": r"returned a tuple of 2 data sets for 'train'.*the one that `split` names",
    "by_name": r"returned a dict for 'train'.*found\[split\]",
}


@pytest.mark.parametrize("kind", DATA)
def test_what_makes_no_data_set_is_refused_in_a_sentence(kind: str):
    options = {"path": "x"} if kind == "split_last" else {}
    with pytest.raises(DataError, match=DATA[kind]):
        components.data.build(f"{HERE}:{kind}", "train", **options)


def test_a_model_that_is_made_already_is_refused_with_what_to_write():
    with pytest.raises(JobError, match=r"model: .*:a_model is a Linear.*function or class.*def make\(\)"):
        find_model(ModelSettings(f"{HERE}:a_model"))


def each(output: Any, target: Any) -> Any:
    return (output.argmax(-1) == target).double()


def nothing(output: Any, target: Any) -> Any:
    return None


def three(output: Any, target: Any) -> Any:
    return 1, 2, 3


def words(output: Any, target: Any) -> Any:
    return "good", 4


class Accuracy:
    """A class where a function of (output, target) is expected."""


METRICS = {
    "each": r"each returned tensor\(.*expected \(sum, count\).*or one number.*all samples.*mean\(\)",
    "nothing": r"nothing returned None .*expected \(sum, count\)",
    "three": r"three returned \(1, 2, 3\) .*expected \(sum, count\)",
    "words": r"words returned \('good', 4\) .*expected \(sum, count\)",
}


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_that_returns_no_sum_and_count_is_refused(metric: str, tmp_path: Path):
    evaluate = EvaluateSettings(metric=f"{HERE}:{metric}")
    with pytest.raises(JobError, match=rf"evaluate\.metric: {METRICS[metric]}"):
        train_here(digits_job(steps=1, evaluate=evaluate), tmp_path)


def test_code_of_the_script_that_is_run_cannot_be_named_and_says_where_to_put_it():
    with pytest.raises(JobError, match=r"model: found '__main__:Net'.*file.*models\.py.*'models:Net'"):
        resolve("__main__:Net", "model", JobError)


NOT_NAMES = {
    "model": (
        nn.Linear,
        r"model: found the class torch\.nn\..*Linear.*expected its name, 'torch\.nn\..*:Linear'",
    ),
    "loss": (
        a_model,
        r"loss: found Linear\(.*expected text.*code is given by its name, 'package\.module:name'",
    ),
    "optimizer.kind": (torch.optim.SGD, r"optimizer\.kind: found the class .*SGD.*expected its name"),
    "data.kind": (no_split, rf"data\.kind: found the function {HERE}\.no_split.*'{HERE}:no_split'"),
}


@pytest.mark.parametrize("key", NOT_NAMES)
def test_classes_functions_and_instances_in_a_job_are_refused_with_the_name_to_give(key: str):
    value, expected = NOT_NAMES[key]
    content: dict[str, Any] = {
        "name": "t",
        "model": "m:n",
        "data": {"kind": "digits", "batch_size": 4},
        "steps": 1,
    }
    first, _, last = key.partition(".")
    content[first] = value if not last else {**content.get(first, {}), last: value}
    with pytest.raises(InputError, match=expected):
        make_job(content)


def test_an_error_while_a_module_is_imported_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_name.py").write_text("import torch\n\nlayer = torch.nn.Linaer(1, 2)\n")
    (tmp_path / "broken_syntax.py").write_text("import torch\n\ndef net(:\n    pass\n")
    (tmp_path / "broken_import.py").write_text("import torch\nfrom torch import nothing_like_this\n")
    (tmp_path / "broken_deeper.py").write_text("\nimport broken_name\n")
    for module, line in {"broken_name": 3, "broken_syntax": 3, "broken_import": 2}.items():
        with pytest.raises(JobError, match=rf"importing {module} failed: .*\({module}\.py, line {line}\)"):
            resolve(f"{module}:net", "model", JobError)
    with pytest.raises(JobError, match=r"importing broken_deeper failed: .*\(broken_name\.py, line 3\)"):
        resolve("broken_deeper:net", "model", JobError)


def test_a_data_set_that_is_no_class_of_torchs_is_taken_as_before():
    source = build_train_data(digits_job(data=DataSettings("digits", 4)))
    assert len(source) > 0
