"""BERT's pre-training data as NVIDIA's scripts write it: hdf5 shards of masked sentence pairs.

A shard holds six arrays with a row for each sample: `input_ids`, `input_mask` and `segment_ids` (samples,
length), `masked_lm_positions` and `masked_lm_ids` (samples, most masked; unused entries are 0), and
`next_sentence_labels` (samples): 1 if the second sentence is not the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bert.word_pieces import read_pieces
from hdf5 import Array, check_keys, open_hdf5
from plait.core.errors import DataError
from plait.workloads.data.stored import Fingerprinted, Split
from plait.workloads.metrics import IGNORED

KEYS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
EXPECTED = f"a shard with the arrays {', '.join(KEYS)}"
REMEDY = "write the shard again (examples/make_shards.py makes some from text), or remove it"
VOCABULARY_FILE = "vocab.txt"


def bert_shards(
    split: Split, path: str, lanes: int = 8, vocabulary: int | None = None
) -> PretrainingShards | None:
    """The samples of all shards of a split below `path`, as dicts of the model's arguments.

    Shards are `path/training/*.hdf5` and `path/test/*.hdf5`, or files in `path` with `training` or `test` in
    their names. The shuffled order of an epoch assigns shards to `lanes`; each batch has equal consecutive
    parts of the lanes, so that of N workers, if N divides `lanes`, each reads different shards, one after the
    other. `vocabulary` is the upper limit of token numbers, by default the lines of `path/vocab.txt`.
    """
    if lanes < 1:
        raise DataError(f"data.lanes: found {lanes}, expected at least 1; use the number of workers")
    folder = Path(path).expanduser()
    files = find_shards(folder, split)
    if not files:
        if split == "test":
            return None
        raise DataError(
            f"{folder}: found no shards for training; expected training/*.hdf5 in it; make some from text: "
            f"python examples/make_shards.py TEXT --to {folder}"
        )
    pieces = read_pieces(folder / VOCABULARY_FILE) if (folder / VOCABULARY_FILE).exists() else None
    known = vocabulary or (None if pieces is None else len(pieces))
    heads = [read_head(file) for file in files]
    for head in heads[1:]:
        if head.length != heads[0].length:
            raise DataError(
                f"{head.path}: found samples of {head.length} tokens, but {heads[0].path.name} has "
                f"{heads[0].length}; expected one length in all shards; {REMEDY}"
            )
    return PretrainingShards(heads, lanes, known, None if pieces is None else pieces.id)


def find_shards(path: Path, split: Split) -> list[Path]:
    """The shards of a split, by name."""
    word = "training" if split == "train" else "test"
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; set data.path to one with hdf5 shards")
    inside = sorted(
        file for folder in dict.fromkeys((word, split)) for file in (path / folder).glob("*.hdf5")
    )
    return inside or sorted(file for file in path.glob("*.hdf5") if word in file.name)


@dataclass(frozen=True)
class ShardHead:
    """The path of a shard, its number of samples, and their length in tokens."""

    path: Path
    samples: int
    length: int


def read_head(path: Path) -> ShardHead:
    """Read a shard's sizes; raises if arrays are missing or inconsistent."""
    with open_hdf5(path, EXPECTED, REMEDY) as file:
        check_keys(path, file, KEYS, REMEDY)
        shapes = {key: tuple(file[key].shape) for key in KEYS}
    samples = shapes["input_ids"][0] if shapes["input_ids"] else 0
    for key, shape in shapes.items():
        axes = 1 if key == "next_sentence_labels" else 2
        like = "masked_lm_positions" if key == "masked_lm_ids" else "input_ids"
        free = key == "masked_lm_positions"
        if len(shape) != axes or shape[0] != samples or (axes == 2 and not free and shape != shapes[like]):
            raise DataError(
                f"{path}: {key} has shape {shape}, but {like} {shapes[like]}; expected a row for each of the "
                f"{samples:,} samples; {REMEDY}"
            )
    if samples == 0:
        raise DataError(f"{path}: found no samples; {REMEDY}")
    return ShardHead(path, samples, shapes["input_ids"][1])


class PretrainingShards(Fingerprinted):
    """Samples by number, over all shards in order; the shards in use are in memory."""

    def __init__(
        self, heads: Sequence[ShardHead], lanes: int, vocabulary: int | None, fingerprint: str | None
    ) -> None:
        self.vocabulary = vocabulary
        self._fingerprint = fingerprint
        self.input_shape = (heads[0].length,)
        self._heads = list(heads)
        self._lanes = lanes
        self.order_options = {"lanes": lanes}
        self._ends = np.cumsum([head.samples for head in heads])
        self._open: OrderedDict[int, dict[str, Array]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} in a set of {len(self)} samples")
        index %= len(self)
        shard = self.shard_of(index)
        arrays = self._arrays(shard)
        row = index - int(self._ends[shard]) + self._heads[shard].samples
        tokens = torch.from_numpy(arrays["input_ids"][row].astype(np.int64))
        labels = torch.full_like(tokens, IGNORED)
        masked = arrays["masked_lm_positions"][row] > 0  # the first token, [CLS], never is
        positions = torch.from_numpy(arrays["masked_lm_positions"][row][masked].astype(np.int64))
        labels[positions] = torch.from_numpy(arrays["masked_lm_ids"][row][masked].astype(np.int64))
        return {
            "input_ids": tokens,
            "attention_mask": torch.from_numpy(arrays["input_mask"][row].astype(np.int64)),
            "token_type_ids": torch.from_numpy(arrays["segment_ids"][row].astype(np.int64)),
            "labels": labels,
            "next_sentence_label": torch.tensor(int(arrays["next_sentence_labels"][row])),
        }

    def limit_tokens(self, count: int) -> None:
        """Set the upper limit of token numbers, if no vocabulary gives it."""
        self.vocabulary = self.vocabulary or count

    def shard_of(self, index: int) -> int:
        """The number of the shard that holds a sample."""
        return int(np.searchsorted(self._ends, index, side="right"))

    def epoch_order(self, seed: int, batch_size: int) -> list[int]:
        """Shards in a shuffled order, distributed over workers, with their samples shuffled."""
        return lane_order([head.samples for head in self._heads], seed, batch_size, self._lanes)

    def _arrays(self, shard: int) -> dict[str, Array]:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        while len(self._open) > self._lanes:
            self._open.popitem(last=False)
        head = self._heads[shard]
        with open_hdf5(head.path, EXPECTED, REMEDY) as file:
            arrays = {key: file[key][...] for key in KEYS}
        self._check_values(head.path, arrays)
        self._open[shard] = arrays
        return arrays

    def _check_values(self, path: Path, arrays: dict[str, Array]) -> None:
        length = self.input_shape[0]
        for key, values in arrays.items():
            kind = values.dtype.kind
            if kind not in "iuf" or (kind == "f" and (values != np.floor(values)).any()):
                raise DataError(
                    f"{path}: {key} holds {values.dtype} values, expected whole numbers; {REMEDY}"
                )
        limits = {"masked_lm_positions": length, "segment_ids": 2, "next_sentence_labels": 2}
        if self.vocabulary is not None:
            limits |= {"input_ids": self.vocabulary, "masked_lm_ids": self.vocabulary}
        for key, limit in limits.items():
            values = arrays[key]
            wrong = np.flatnonzero(((values < 0) | (values >= limit)).reshape(len(values), -1).any(1))
            if len(wrong):
                row = int(wrong[0])
                found = int(values[row].max()) if int(values[row].min()) >= 0 else int(values[row].min())
                raise DataError(
                    f"{path}: {key}, row {row:,}: found {found}, expected 0 to {limit - 1}; was it made with "
                    f"another vocabulary (model_args.vocabulary) or length? {REMEDY}"
                )


def synthetic_shards(
    split: Split, samples: int = 64, length: int = 32, vocabulary: int = 256, masked: int = 4, seed: int = 0
) -> SyntheticPairs:
    """Samples of the same form, whose tokens count upwards: masked ones follow from their neighbours."""
    return SyntheticPairs(samples, length, vocabulary, masked, 2 * seed + (split == "test"))


class SyntheticPairs:
    """Two halves of a sequence that counts upwards; the second may be from another sequence."""

    def __init__(self, samples: int, length: int, vocabulary: int, masked: int, seed: int) -> None:
        if length < 8 or vocabulary < 16 or not 1 <= masked <= length // 4:
            raise DataError(
                f"data: found length {length}, vocabulary {vocabulary} and masked {masked}, expected at "
                f"least 8 tokens, 16 kinds of them, and at most a quarter masked"
            )
        self.vocabulary = vocabulary
        self.input_shape = (length,)
        self._samples, self._masked, self._seed = samples, masked, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(f"index {index} in a set of {self._samples} samples")
        generator = torch.Generator().manual_seed((self._seed << 20) + index)
        length, room = self.input_shape[0], self.vocabulary - 5
        begins = torch.randint(room, (2,), generator=generator)
        is_other = int(torch.randint(2, (), generator=generator))
        half = torch.arange(length) >= length // 2
        tokens = 5 + (begins[0] + torch.arange(length) + half * is_other * begins[1]) % room
        # Every sample has some padding and the same number of masked tokens.
        used = length - int(torch.randint(length // 4, (), generator=generator))
        positions = 1 + torch.randperm(used - 1, generator=generator)[: self._masked]
        labels = torch.full_like(tokens, IGNORED)
        labels[positions] = tokens[positions]
        tokens[positions] = 4
        mask = (torch.arange(length) < used).long()
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "token_type_ids": half.long() * mask,
            "labels": labels,
            "next_sentence_label": torch.tensor(is_other),
        }


def lane_order(samples: Sequence[int], seed: int, batch_size: int, lanes: int) -> list[int]:
    """All samples of shards of the given sizes, once; each of `lanes` readers reads one shard at a time.

    Shards are assigned, in a shuffled order, to the lane with the fewest samples. A batch consists of
    consecutive parts, one of each lane, in order; if a lane has ended, others contribute more. The order does
    not depend on the number of workers, nor on where a run was resumed.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    begins = np.concatenate([[0], np.cumsum(samples)])
    dealt: list[list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = [[] for _ in range(lanes)]
    sizes = [0] * lanes
    for shard in generator.permutation(len(samples)):
        lane = sizes.index(min(sizes))
        dealt[lane].append(begins[shard] + generator.permutation(samples[shard]))
        sizes[lane] += samples[shard]
    rows = [np.concatenate(lane) if lane else np.empty(0, np.int64) for lane in dealt]
    return _merged(rows, batch_size).tolist()


def _merged(
    lanes: list[np.ndarray[tuple[int], np.dtype[np.int64]]], batch_size: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The batches, each in equal parts of the remaining lanes."""
    parts = []
    left = [lane for lane in lanes if len(lane)]
    while left:
        ends = [batch_size * i // len(left) for i in range(len(left) + 1)]
        for index, (begin, end) in enumerate(pairwise(ends)):
            parts.append(left[index][: end - begin])
            left[index] = left[index][end - begin :]
        left = [lane for lane in left if len(lane)]
    return np.concatenate(parts)
