"""Data sets by name: wrong kinds and options, a user's own set, digits and synthetic samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.core.errors import DataError
from plait.workloads.data import KINDS, build, check
from plait.workloads.data import digits as digits_module


class Squares:
    """A user's own data set."""

    def __init__(self, split: str, count: int = 3) -> None:
        self.numbers = list(range(count)) if split == "train" else [count]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.tensor(float(self.numbers[index]))
        return number, number**2


def no_data_set(split: str) -> int:
    return 3


def read_all(dataset):
    return [dataset[index] for index in range(len(dataset))]


def test_a_misspelt_kind_is_answered_with_the_nearest():
    with pytest.raises(DataError, match=r"data\.kind: unknown kind 'digit'; did you mean 'digits'"):
        build("digit", "train")


def test_a_misspelt_option_is_answered_with_the_nearest():
    with pytest.raises(DataError, match=r"data\.lenght: text takes no 'lenght'; did you mean 'length'"):
        build("text", "train", path="x", lenght=3)


def test_a_missing_option_is_named():
    with pytest.raises(DataError, match=r"needs 'path'; add data\.path"):
        build("cifar", "train")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("image-folder", {"path": "x", "size": "big"}, r"data\.size: found 'big', expected a whole number"),
        ("image-folder", {"path": "x", "size": 0}, r"data\.size: found 0, expected at least 1"),
        ("text", {"path": 7}, r"data\.path: found 7, expected Path"),
        ("text", {"path": "x", "level": "wrd"}, r"data\.level: found 'wrd', expected one of word, char"),
        ("text", {"path": "x", "test_fraction": 1}, r"data\.test_fraction: found 1\.0, expected more than 0"),
        ("text", {"path": "x", "length": 0}, r"data\.length: found 0, expected at least 1"),
        ("text", {"path": "x", "vocabulary": 1}, r"data\.vocabulary: found 1, expected at least 2"),
        ("cifar", {"path": "x", "classes": 20}, r"data\.classes: found 20, expected one of 10, 100"),
        ("synthetic", {"shape": ["a"]}, r"data\.shape\[0\]: found 'a', expected a whole number"),
        ("synthetic", {"shape": [0]}, r"data\.shape: found \[0\], expected sizes of at least 1"),
        ("synthetic", {"shape": [2], "samples": 0}, r"data\.samples: found 0, expected at least 1"),
        ("synthetic", {"shape": [2], "classes": 2, "target_shape": [1]}, "both classes and target_shape"),
        ("synthetic", {"shape": [], "vocabulary": 5}, r"data\.shape: found no axes"),
    ],
)
def test_a_wrong_value_is_refused_with_its_option_and_what_was_expected(kind, options, message):
    with pytest.raises(DataError, match=message):
        build(kind, "train", **options)


def test_options_are_checked_and_converted_without_reading_a_file():
    factory, options = check("text", {"path": "~/missing.txt", "length": 9})
    assert factory is KINDS["text"]
    assert options == {"path": Path.home() / "missing.txt", "length": 9}
    assert check("synthetic", {"shape": [2, 3]})[1] == {"shape": (2, 3)}
    with pytest.raises(DataError, match=r"data\.length: found 'nine', expected a whole number"):
        check("text", {"path": "missing.txt", "length": "nine"})


def test_a_users_own_set_is_built_from_its_name():
    assert read_all(build("test_data_kinds:Squares", "train", count=4))[3] == (3.0, 9.0)
    assert len(build("test_data_kinds:Squares", "test")) == 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("test_data_kinds:Squares", {"cuont": 2}, "did you mean 'count'"),
        ("test_data_kinds:Square", {}, "did you mean 'Squares'"),
        ("test_data_kinds:Squares", {"count": 0}, "empty data set"),
        ("test_data_kinds:no_data_set", {}, "returned a int for .train., expected a map-style data set"),
        ("math:pi", {}, "expected a function or class"),
    ],
)
def test_a_users_own_set_that_cannot_be_used_is_refused(kind, options, message):
    with pytest.raises(DataError, match=message):
        build(kind, "train", **options)


def test_importing_the_data_sets_loads_neither_pillow_nor_scikit_learn():
    check = "import sys, plait.workloads.data; print({'PIL', 'sklearn'} & set(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "set()"


def test_digits_are_split_without_overlap_and_hold_every_image_of_scikit_learn():
    from sklearn.datasets import load_digits

    train, test = build("digits", "train"), build("digits", "test")
    assert (len(train), len(test)) == (1442, 355)
    assert (train.classes, train.input_shape) == (10, (1, 8, 8))
    ours = torch.cat([train.collated_batch(list(range(1442)))[0], test.collated_batch(list(range(355)))[0]])
    theirs = (torch.from_numpy(load_digits().images).float() / 16 - 0.3053) / 0.3760
    as_rows = [
        sorted(map(tuple, images.reshape(-1, 64).mul(16).round().tolist())) for images in (ours, theirs)
    ]
    assert as_rows[0] == as_rows[1]
    assert abs(ours.mean()) < 0.001
    assert abs(ours.std() - 1) < 0.001


def test_digits_come_from_scikit_learn_itself_where_its_file_lies_elsewhere(monkeypatch):
    usual = build("digits", "test")
    monkeypatch.setattr(digits_module, "DIGITS_FILE", "elsewhere.csv.gz")
    other = build("digits", "test")
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(read_all(usual), read_all(other)))


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr(digits_module, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        build("digits", "train")


def test_a_batch_read_at_once_equals_its_samples_stacked():
    for dataset in (
        build("digits", "train"),
        build("synthetic", "train", shape=[2, 3], samples=50),
        build("synthetic", "train", shape=[4], vocabulary=9, samples=50),
    ):
        chosen = [7, 3, 41, 3]
        inputs, targets = dataset.collated_batch(chosen)
        assert torch.equal(inputs, torch.stack([dataset[i][0] for i in chosen]))
        assert torch.equal(targets, torch.stack([dataset[i][1] for i in chosen]))


def test_a_synthetic_sample_depends_on_seed_split_and_index_alone():
    def first(split="train", seed=0, index=0):
        return build("synthetic", split, shape=[5], seed=seed)[index][0]

    torch.manual_seed(1)
    sample = first()
    torch.manual_seed(2)
    assert torch.equal(first(), sample)
    assert not torch.equal(first(index=1), sample)
    assert not torch.equal(first(seed=1), sample)
    assert not torch.equal(first(split="test"), sample)
    state = torch.get_rng_state()
    first()
    assert torch.equal(torch.get_rng_state(), state)


def test_synthetic_inputs_and_targets_have_the_kind_that_was_asked_for():
    numbers, label = build("synthetic", "train", shape=[3, 4, 4])[0]
    assert (numbers.dtype, numbers.shape, label.dtype, label.shape) == (
        torch.float32,
        (3, 4, 4),
        torch.int64,
        (),
    )
    labels = {int(build("synthetic", "train", shape=[1], classes=3)[i][1]) for i in range(50)}
    assert labels == {0, 1, 2}
    assert build("synthetic", "train", shape=[3], target_shape=[2, 2])[0][1].shape == (2, 2)
    tokens, label = build("synthetic", "train", shape=[6], vocabulary=5, classes=2)[0]
    assert tokens.dtype == torch.int64
    assert tokens.max() < 5
    assert label < 2
    tokens, later = build("synthetic", "train", shape=[6], vocabulary=1000)[0]
    assert torch.equal(tokens[1:], later[:-1])


@pytest.mark.parametrize("kind", ["digits", "synthetic"])
def test_an_index_out_of_range_ends_an_iteration(kind):
    dataset = build(kind, "test", **({"shape": [2], "samples": 6} if kind == "synthetic" else {}))
    assert len(list(dataset)) == len(dataset)
    assert torch.equal(dataset[-1][0], dataset[len(dataset) - 1][0])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_every_kind_is_registered_under_its_job_file_name():
    images = {"cifar", "digits", "fashion-mnist", "image-folder"}
    assert set(KINDS) == images | {"continued-text", "synthetic", "text"}
