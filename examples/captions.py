"""Video captions: frame features in an hdf5 file, captions in a JSON file in the layout of MSR-VTT.

`features.hdf5` has one array (frames, features) for each video, under its id. `captions.json` is an object
with `videos`, a list of `{"video_id": ..., "split": "train" | "validate" | "test"}`, and `sentences`, a list
of `{"video_id": ..., "caption": "a man is cooking"}`; a video may have several.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdf5 import open_hdf5
from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, fingerprint, read_bytes
from plait.workloads.data.stored import Fingerprinted, Split
from plait.workloads.data.text import vocabulary_of
from plait.workloads.metrics import IGNORED

FEATURES_FILE, CAPTIONS_FILE = "features.hdf5", "captions.json"
BEGIN, END = "<begin>", "<end>"
_SPLITS = ("train", "validate", "test")
_EXPECTED = "an array (frames, features) for each video, under its id"
_REMEDY = "write the features again, one array for each video_id of captions.json"
_JSON_REMEDY = (
    'expected {"videos": [{"video_id", "split"}], "sentences": [{"video_id", "caption"}]}, as MSR-VTT has it'
)
CaptionSample = tuple[tuple[Tensor, Tensor], Tensor]


def captions(
    split: Split, path: str, frames: int = 80, length: int = 20, vocabulary: int | None = None
) -> Captions:
    """The captions of a split's videos: ((features, words), words one later); padding is ignored.

    A video with more than `frames` frames is sampled evenly; one with fewer is padded with zeros. Captions
    are truncated to `length` words. The vocabulary is that of the training captions, most frequent words
    first, at most `vocabulary` of them.
    """
    if frames < 1 or length < 1:
        raise DataError(f"data.frames: found {frames} frames and {length} words, expected at least 1 of each")
    folder = Path(path).expanduser()
    splits, sentences = _read_captions(folder / CAPTIONS_FILE)
    target = [words for video, words in sentences if splits[video] == "train"]
    if vocabulary is not None and vocabulary < 4:
        raise DataError(f"data.vocabulary: found {vocabulary}, expected at least 4 words")
    most = None if vocabulary is None else vocabulary - 2
    known = vocabulary_of([word for words in target for word in words], most)
    known |= {BEGIN: len(known), END: len(known) + 1}
    selected = [(video, words) for video, words in sentences if splits[video] == split]
    if not selected:
        raise DataError(
            f"{folder / CAPTIONS_FILE}: found no captions of videos with split {split!r}; add some"
        )
    features = _read_features(folder / FEATURES_FILE, sorted({video for video, _ in selected}), frames)
    numbers = [
        [known[BEGIN], *(known.get(w, 0) for w in words[:length]), known[END]] for _, words in selected
    ]
    return Captions(features, [video for video, _ in selected], numbers, length, list(known))


def _read_captions(path: Path) -> tuple[dict[str, str], list[tuple[str, list[str]]]]:
    """The split of each video, and the words of each caption with its video."""
    text = decode_text(path, read_bytes(path, "captions of videos", _JSON_REMEDY), _JSON_REMEDY)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as failure:
        raise DataError(
            f"{path}, line {failure.lineno}: not JSON ({failure.msg}, column {failure.colno}); {_JSON_REMEDY}"
        ) from None
    splits: dict[str, str] = {}
    for i, entry in enumerate(_list(path, content, "videos")):
        video, split = (_text(path, entry, key, f"videos[{i}]") for key in ("video_id", "split"))
        if split not in _SPLITS or video in splits:
            problem = f"split: found {split!r}" if video not in splits else f"video_id: found {video!r} again"
            raise DataError(
                f"{path}: videos[{i}].{problem}, expected each video once, in {', '.join(_SPLITS[:-1])} or "
                f"{_SPLITS[-1]}; {_JSON_REMEDY}"
            )
        splits[video] = split
    sentences = []
    for i, sentence in enumerate(_list(path, content, "sentences")):
        video = _text(path, sentence, "video_id", f"sentences[{i}]")
        if video not in splits:
            raise DataError(f"{path}: sentences[{i}]: {video!r} is not among videos; {_JSON_REMEDY}")
        sentences.append((video, _text(path, sentence, "caption", f"sentences[{i}]").lower().split()))
    return splits, sentences


def _list(path: Path, content: Any, key: str) -> list[Any]:
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise DataError(f"{path}: found no list {key!r}; {_JSON_REMEDY}")
    items: list[Any] = content[key]
    return items


def _text(path: Path, holder: Any, key: str, where: str) -> str:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, str):
        raise DataError(f"{path}: {where}.{key}: found {value!r}, expected text; {_JSON_REMEDY}")
    return value


def _read_features(path: Path, videos: Sequence[str], frames: int) -> dict[str, Tensor]:
    """The features of each video, with the same number of frames."""
    features: dict[str, Tensor] = {}
    width: int | None = None
    with open_hdf5(path, _EXPECTED, _REMEDY) as file:
        for video in videos:
            if video not in file:
                raise DataError(f"{path}: no array for video {video!r} ({len(file)} others); {_REMEDY}")
            shape = tuple(getattr(file[video], "shape", ()))
            width = shape[-1] if width is None and shape else width
            if len(shape) != 2 or 0 in shape or shape[1] != width:
                raise DataError(
                    f"{path}: video {video!r} has shape {shape}, expected (frames, "
                    f"{width or 'features'}), as others have; {_REMEDY}"
                )
            values = file[video][...]
            if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
                raise DataError(
                    f"{path}: video {video!r} holds {values.dtype} values, expected finite numbers; {_REMEDY}"
                )
            rows = np.linspace(0, shape[0] - 1, min(frames, shape[0])).round().astype(int)
            chosen = torch.from_numpy(values[rows].astype(np.float32))
            features[video] = torch.cat([chosen, chosen.new_zeros(frames - len(chosen), shape[1])])
    return features


def synthetic_captions(
    split: Split, samples: int = 64, features: int = 12, frames: int = 6, words: int = 8, seed: int = 0
) -> Captions:
    """Synthetic videos of two things in turn, captioned by the things' names in that order."""
    draw = torch.Generator().manual_seed(2 * seed + (split == "test"))
    looks = torch.randn(words, features, generator=torch.Generator().manual_seed(seed))
    vocabulary = ["<unk>", BEGIN, END, *(f"thing{i}" for i in range(words))]
    videos, numbers = {}, []
    for i in range(samples):
        things = torch.randint(words, (2,), generator=draw)
        each = things.repeat_interleave(frames // 2 + 1)[:frames]
        videos[str(i)] = looks[each] + 0.1 * torch.randn(frames, features, generator=draw)
        numbers.append([1, *(things[: 1 + i % 2] + 3).tolist(), 2])
    return Captions(videos, list(videos), numbers, 3, vocabulary)


class Captions(Fingerprinted):
    """Samples ((features, words), target), one for each caption."""

    def __init__(
        self,
        features: dict[str, Tensor],
        videos: Sequence[str],
        captions: Sequence[Sequence[int]],
        length: int,
        words: Sequence[str],
    ) -> None:
        self.words = list(words)
        self.vocabulary = len(words)
        self._fingerprint = fingerprint(words)
        self.input_shape = tuple(next(iter(features.values())).shape)
        self._features, self._videos, self._length = features, videos, length
        self._captions = captions

    def __len__(self) -> int:
        return len(self._captions)

    def __getitem__(self, index: int) -> CaptionSample:
        caption = torch.tensor(self._captions[index])
        # Each input word predicts the next one; the last word is only a target.
        previous = torch.zeros(self._length + 1, dtype=torch.long)
        target = torch.full((self._length + 1,), IGNORED)
        previous[: len(caption) - 1], target[: len(caption) - 1] = caption[:-1], caption[1:]
        return (self._features[self._videos[index]], previous), target
