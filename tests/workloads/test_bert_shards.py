"""BERT's pre-training shards: made from text, read as NVIDIA's, shared out over workers, resumed exactly."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from bert.shards import KEYS
from bert.word_pieces import SPECIAL, WordPieces, read_pieces
from make_shards import ShardSettings, build_vocabulary, make_shards
from plait.core.errors import DataError, JobError
from plait.data.batches import DataSource
from plait.data.sampler import Position, batches, share
from plait.schema.settings import DataSettings, EvaluateSettings, ModelSettings, OptimizerSettings
from plait.workloads.data import build
from support.training import digits_job, largest_difference, train_here

TEXT = """The cat sat on the mat.
It was a small cat!
The dog ran away.

Ships sail far.
Nobody knows where.
"""


def text_file(folder: Path, repeats: int = 12) -> Path:
    path = folder / "text.txt"
    path.write_text((TEXT + "\n") * repeats)
    return path


def shards_in(folder: Path, **changes: Any) -> Path:
    settings = ShardSettings(**{"length": 24, "masked": 4, "shards": 4, "test_fraction": 0.1, **changes})
    make_shards([text_file(folder)], folder / "shards", 80, settings)
    return folder / "shards"


def write_shard(path: Path, samples: int = 6, **changes: Any) -> None:
    """A shard as NVIDIA's scripts write one, with some arrays changed, or left out where None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        "input_ids": np.full((samples, 8), 7, np.int32),
        "input_mask": np.ones((samples, 8), np.int8),
        "segment_ids": np.zeros((samples, 8), np.int8),
        "masked_lm_positions": np.tile(np.array([2, 5, 0], np.int32), (samples, 1)),
        "masked_lm_ids": np.tile(np.array([9, 8, 0], np.int32), (samples, 1)),
        "next_sentence_labels": np.zeros(samples, np.int8),
    }
    with h5py.File(path, "w") as file:
        for key, rows in {**arrays, **changes}.items():
            if rows is not None:
                file.create_dataset(key, data=rows, compression="gzip")


def test_a_vocabulary_joins_what_occurs_most_often_and_splits_words_into_its_longest_pieces() -> None:
    lines = ["low " * 5, "lower " * 2, "newest " * 6, "widest " * 3]
    pieces = build_vocabulary(lines, 60)
    assert pieces[:5] == list(SPECIAL)
    assert "##est" in pieces
    assert "low" in pieces
    assert pieces == build_vocabulary(lines[::-1], 60)
    assert len(build_vocabulary(lines[:2], 9)) == 9
    found = WordPieces(pieces)
    text = "Lowest, Ünewest x\u4e2d"
    shown = [(found.pieces[p.number], text[p.begin : p.end]) for p in found.encode(text)]
    assert shown[:2] == [("low", "Low"), ("##est", "est")]
    assert ("[UNK]", ",") in shown
    assert shown[-1] == ("[UNK]", "\u4e2d")


def test_pieces_are_those_of_the_transformers_library(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shards_in(tmp_path)
    ours, theirs = read_pieces(folder / "vocab.txt"), transformers.BertTokenizer(str(folder / "vocab.txt"))
    for line in (*TEXT.splitlines(), "Naïve  cats, sat-on (THE) Ma\u0301t's?"):
        assert [p.number for p in ours.encode(line)] == theirs.encode(line, add_special_tokens=False)


def test_shards_made_from_text_hold_pairs_whose_masked_tokens_are_known(tmp_path: Path) -> None:
    folder = shards_in(tmp_path)
    train, test = (
        build("bert.shards:bert_shards", "train", path=str(folder)),
        build("bert.shards:bert_shards", "test", path=str(folder)),
    )
    pieces = read_pieces(folder / "vocab.txt")
    assert train.vocabulary == len(pieces) <= 80
    assert len(test) == round((len(train) + len(test)) * 0.1)
    labels = {int(train[i]["next_sentence_label"]) for i in range(len(train))}
    assert labels == {0, 1}
    hidden = 0
    for i in range(len(train)):
        sample = train[i]
        used = int(sample["attention_mask"].sum())
        tokens, masked = sample["input_ids"], sample["labels"] != -100
        assert tokens[0] == pieces.first
        assert tokens[used - 1] == pieces.separator
        assert not tokens[used:].any()
        assert int((tokens == pieces.separator).sum()) == 2
        assert 1 <= int(masked.sum()) <= 4
        hidden += int((tokens[masked] == pieces.mask).sum())
        first = tokens[:used][sample["token_type_ids"][:used] == 0]
        assert first[-1] == pieces.separator
    assert hidden > len(train)
    again = tmp_path / "again"
    again.mkdir()
    other = build("bert.shards:bert_shards", "train", path=str(shards_in(again)))
    assert all(torch.equal(train[3][key], other[3][key]) for key in train[3])


def test_shards_of_nvidia_are_read_as_the_models_arguments(tmp_path: Path) -> None:
    write_shard(tmp_path / "wiki_training_0.hdf5")
    write_shard(tmp_path / "wiki_training_1.hdf5", 3, next_sentence_labels=np.ones(3, np.int8))
    train = build("bert.shards:bert_shards", "train", path=str(tmp_path))
    assert (len(train), train.input_shape) == (9, (8,))
    assert train[5]["labels"].tolist() == [-100, -100, 9, -100, -100, 8, -100, -100]
    assert [int(train[i]["next_sentence_label"]) for i in (5, 6, -1)] == [0, 1, 1]
    assert build("bert.shards:bert_shards", "test", path=str(tmp_path)) is None


def test_each_worker_reads_shards_of_its_own_and_every_sample_comes_once(tmp_path: Path) -> None:
    for number in range(4):
        write_shard(tmp_path / "training" / f"{number}.hdf5", 8)
    source = DataSource(build("bert.shards:bert_shards", "train", path=str(tmp_path), lanes=2))
    order = batches(Position(), 32, 4, seed=3, shuffle=True, keep_last=True, own_order=source.own_order(3, 4))
    seen: list[set[int]] = [set(), set()]
    epochs: list[list[int]] = [[], []]
    for batch in islice(order, 16):
        epochs[batch.epoch] += batch.samples
        for rank in range(2):
            if batch.epoch == 0:
                seen[rank] |= {source.dataset.shard_of(i) for i in share(batch.samples, rank, 2)}
    assert [len(shards) for shards in seen] == [2, 2]
    assert seen[0].isdisjoint(seen[1])
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(32))
    assert epochs[0] != epochs[1]
    middle = batches(
        Position(0, 12), 32, 4, seed=3, shuffle=True, keep_last=True, own_order=source.own_order(3, 4)
    )
    assert [i for batch in islice(middle, 5) for i in batch.samples] == epochs[0][12:]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 40, 3), (7,), (5, 5, 5, 5, 5)])
def test_unequal_shards_and_odd_batches_still_give_every_sample_once(sizes: Any, tmp_path: Path) -> None:
    for number, size in enumerate(sizes):
        write_shard(tmp_path / "training" / f"{number}.hdf5", size)
    dataset = build("bert.shards:bert_shards", "train", path=str(tmp_path), lanes=3)
    for batch_size in (1, 2, 7):
        assert sorted(dataset.epoch_order(5, batch_size)) == list(range(sum(sizes)))


def test_a_resumed_run_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data = DataSettings("bert.shards:bert_shards", 8, {"path": str(shards_in(tmp_path)), "lanes": 2})
    args = {"size": "tiny", "vocabulary": 80, "context": 24}
    job = digits_job(
        model=ModelSettings("plait.workloads.bert:pretraining", args),
        data=data,
        loss="model",
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}),
        evaluate=EvaluateSettings(metric="plait.workloads.bert:masked_accuracy"),
        steps=9,
    )
    whole, weights = train_here(job, tmp_path / "whole")
    train_here(digits_job(**{**vars(job), "steps": 4}), tmp_path / "parts")
    resumed, found = train_here(job, tmp_path / "parts", resume=True)
    assert largest_difference(found, weights) == 0.0
    assert resumed.test == whole.test
    assert 0 <= whole.test["masked_accuracy"] <= 1
    other = DataSettings("bert.shards:bert_shards", 8, {**data.options, "lanes": 3})
    with pytest.raises(
        JobError, match=r"data\.lanes 3, but .* data\.lanes 2, by which bert.shards:bert_shards orders"
    ):
        train_here(digits_job(**{**vars(job), "data": other, "steps": 12}), tmp_path / "parts", resume=True)


BAD_SHARDS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"masked_lm_ids": None}, "no array 'masked_lm_ids' in it, found input_ids"),
    "short": (
        {"input_mask": np.ones((5, 8), np.int8)},
        r"input_mask has shape \(5, 8\), but input_ids \(6, 8\)",
    ),
    "labels": ({"next_sentence_labels": np.zeros(2)}, r"next_sentence_labels has shape \(2,\)"),
    "tokens": ({"input_ids": np.full((6, 8), 31)}, r"input_ids, row 0: found 31, expected 0 to 29"),
    "places": ({"masked_lm_positions": np.full((6, 3), 8)}, "masked_lm_positions, row 0: found 8"),
    "fractions": ({"input_mask": np.full((6, 8), 0.5)}, "input_mask holds float64 values, expected whole"),
    "text": ({"input_ids": np.full((6, 8), b"a")}, r"input_ids holds \|S1 values, expected whole numbers"),
    "empty": (dict.fromkeys(KEYS, np.zeros((0, 1))), "next_sentence_labels has shape|found no samples"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_a_damaged_shard_is_refused_with_its_name_and_what_is_wrong(case: str, tmp_path: Path) -> None:
    changes, message = BAD_SHARDS[case]
    write_shard(tmp_path / "training" / "wiki.hdf5", **changes)
    with pytest.raises(DataError, match=rf"wiki\.hdf5: .*{message}.* write the shard again"):
        build("bert.shards:bert_shards", "train", path=str(tmp_path), vocabulary=30)[0]


def test_shards_without_a_vocabulary_are_held_to_the_tokens_that_the_model_knows(tmp_path: Path) -> None:
    write_shard(tmp_path / "training" / "wiki.hdf5")
    train = build("bert.shards:bert_shards", "train", path=str(tmp_path))
    train.limit_tokens(9)
    with pytest.raises(DataError, match=r"masked_lm_ids, row 0: found 9, expected 0 to 8.*model_args"):
        train[0]


def test_a_file_that_is_cut_off_or_no_hdf5_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "training" / "wiki.hdf5"
    write_shard(path, 500, input_ids=np.random.default_rng(0).integers(0, 9, (500, 8)))
    whole = path.read_bytes()
    for content in (whole[:700], whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"wiki\.hdf5: not a whole hdf5 file .* write the shard again"):
            build("bert.shards:bert_shards", "train", path=str(tmp_path))[0]
    path.unlink()
    with pytest.raises(DataError, match=r"found no shards for training.* python examples/make_shards"):
        build("bert.shards:bert_shards", "train", path=str(tmp_path))


def test_texts_and_vocabularies_that_cannot_be_used_are_refused_with_their_line(tmp_path: Path) -> None:
    text, words = tmp_path / "text", tmp_path / "vocab.txt"
    text.write_bytes(b"one\ntw\xffo\n")
    with pytest.raises(DataError, match="text, line 2: byte 6 is not UTF-8"):
        make_shards([text], tmp_path / "out")
    text.write_text("\n\n")
    with pytest.raises(DataError, match="no words to build a vocabulary"):
        make_shards([text], tmp_path / "out")
    words.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\na\n")
    with pytest.raises(DataError, match=r"vocab\.txt, line 7: found 'a' again, which line 6 has"):
        read_pieces(words)
    words.write_text("[PAD]\n[UNK]\na b\n")
    with pytest.raises(DataError, match=r"vocab\.txt, line 3: found 'a b', expected one piece"):
        read_pieces(words)
    words.write_text("[PAD]\n[UNK]\na\n")
    with pytest.raises(DataError, match=r"has no \[CLS\], which BERT needs"):
        read_pieces(words)
    folder = shards_in(tmp_path)
    with pytest.raises(DataError, match="has shards already; choose another folder"):
        make_shards([text_file(tmp_path)], folder)


def test_a_vocabulary_that_is_there_already_is_used_or_refused_and_never_rewritten(tmp_path: Path) -> None:
    folder, text = shards_in(tmp_path), text_file(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    words = other / "vocab.txt"
    words.write_bytes((folder / "vocab.txt").read_bytes().rstrip())
    before = words.read_bytes()
    with pytest.raises(DataError, match=r"vocab\.txt: there already, .* use it: --vocabulary"):
        make_shards([text], other, 80)
    make_shards([text], other, words, ShardSettings(length=24))
    assert words.read_bytes() == before
