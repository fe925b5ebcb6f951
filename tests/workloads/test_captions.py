"""Video captions: their two files, S2VT's shapes, and that it learns to say what it sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from captions import BEGIN, END, synthetic_captions
from plait.core.errors import DataError
from plait.workloads.data import build
from plait.workloads.losses import cross_entropy
from plait.workloads.metrics import accuracy
from plait.workloads.video.s2vt import s2vt, s2vt_tiny


def write(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> str:
    """Features of three videos, two to train with, and four captions."""
    shapes = shapes or {"video0": (5, 3), "video1": (2, 3), "video2": (4, 3)}
    with h5py.File(folder / "features.hdf5", "w") as file:
        for video, shape in shapes.items():
            file[video] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    splits = {"video0": "train", "video1": "train", "video2": "test"}
    target = [("video0", "A man sings"), ("video0", "a man"), ("video1", "a dog"), ("video2", "a cat sings")]
    content = {
        "videos": [{"video_id": video, "split": split} for video, split in splits.items()],
        "sentences": [{"video_id": video, "caption": caption} for video, caption in target],
    }
    (folder / "captions.json").write_text(json.dumps({**content, **changes}))
    return str(folder)


def test_captions_come_with_their_videos_frames_and_words_one_later(tmp_path: Path) -> None:
    train = build("captions:captions", "train", path=write(tmp_path), frames=3, length=2)
    assert (len(train), train.input_shape, train.vocabulary) == (3, (3, 3), 7)
    (features, previous), target = train[0]
    assert features[:, 0].tolist() == [0.0, 6.0, 12.0]
    words = train.words
    assert [words[i] for i in previous] == [BEGIN, "a", "man"]
    assert [words[i] for i in target] == ["a", "man", END]
    (features, _), target = train[2]
    assert features[:, 0].tolist() == [0.0, 3.0, 0.0]
    test = build("captions:captions", "test", path=write(tmp_path), frames=3, length=4)
    (_, previous), target = test[0]
    assert [words[i] for i in previous] == [BEGIN, "a", "<unk>", "sings", "<unk>"]
    assert target[-1] == -100
    assert train.fingerprint() == test.fingerprint()
    assert build("captions:captions", "train", path=write(tmp_path), vocabulary=5).words == [
        "<unk>",
        "a",
        "man",
        BEGIN,
        END,
    ]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "axes": ({"shapes": {"video0": (5,), "video1": (2, 3)}}, r"hdf5: video 'video0' has shape \(5,\)"),
    "widths": ({"shapes": {"video0": (5, 3), "video1": (2, 4)}}, r"shape \(2, 4\), expected \(frames, 3\)"),
    "missing": ({"shapes": {"video0": (5, 3)}}, "no array for video 'video1'"),
    "no list": ({"videos": {}}, r"captions\.json: found no list 'videos'"),
    "no id": ({"videos": [{"split": "train"}]}, r"videos\[0\]\.video_id: found None, expected text"),
    "stranger": ({"videos": [{"video_id": "x", "split": "train"}]}, r"sentences\[0\]: 'video0' is not among"),
    "other split": ({"videos": [{"video_id": "x", "split": "dev"}]}, r"videos\[0\]\.split: found 'dev'"),
    "twice": (
        {"videos": 2 * [{"video_id": "x", "split": "test"}]},
        r"videos\[1\]\.video_id: found 'x' again",
    ),
    "no captions": ({"sentences": []}, "found no captions of videos with split 'train'"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    changes, message = BAD[case]
    with pytest.raises(DataError, match=message):
        build("captions:captions", "train", path=write(tmp_path, **changes))


@pytest.mark.parametrize("value", [np.float32("nan"), b"text"])
def test_features_that_are_no_finite_numbers_are_refused(value: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    with h5py.File(tmp_path / "features.hdf5", "a") as file:
        del file["video1"]
        file["video1"] = np.full((2, 3), value)
    with pytest.raises(DataError, match=r"features\.hdf5: video 'video1' holds .* expected finite numbers"):
        build("captions:captions", "train", path=path)


def test_files_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    features, sentences = tmp_path / "features.hdf5", tmp_path / "captions.json"
    features.write_bytes(features.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"features\.hdf5: not a whole hdf5 file"):
        build("captions:captions", "train", path=path)
    sentences.write_text(sentences.read_text()[:40])
    with pytest.raises(DataError, match=r"captions\.json, line 1: not JSON"):
        build("captions:captions", "train", path=path)


def test_a_word_depends_on_the_frames_and_the_words_before_it_alone() -> None:
    torch.manual_seed(0)
    model = s2vt_tiny().double()
    features, words = torch.randn(2, 5, 12).double(), torch.randint(32, (2, 4))
    logits = model(features, words)
    assert logits.shape == (2, 4, 32)
    changed = words.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 32
    later = model(features, changed)
    assert torch.equal(logits[:, :2], later[:, :2])
    assert not torch.equal(logits[:, 2:], later[:, 2:])
    features[:, -1] += 1
    assert not torch.equal(logits[:, 0], model(features, words)[:, 0])


def test_the_papers_model_has_the_layers_of_the_paper() -> None:
    model = s2vt()
    lstms = 4 * 1000 * (500 + 1000 + 2) + 4 * 1000 * (1500 + 1000 + 2)
    rest = (4096 + 1) * 500 + 12_594 * 500 + (1000 + 1) * 12_594
    assert sum(p.numel() for p in model.parameters()) == lstms + rest


def test_it_learns_to_say_what_it_sees() -> None:
    torch.manual_seed(0)
    train = synthetic_captions("train")
    model = s2vt_tiny(train.vocabulary)
    (features, previous), target = torch.utils.data.default_collate([train[i] for i in range(len(train))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(features, previous), target).backward()
        optimizer.step()
    good, count = accuracy(model(features, previous), target)
    assert good / count > 0.8
    found = model.caption(features[:8], begin=1, end=2, longest=4)
    assert sum(len(words) in (1, 2) for words in found) >= 6
