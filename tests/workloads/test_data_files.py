"""Data sets of one file or a few, written here in their real formats: CIFAR, IDX, text."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from plait.core.errors import DataError
from plait.workloads.data import build


def write_cifar(path: Path, records: int, label_bytes: int, first: list[tuple[bytes, int]]) -> None:
    """A file of the real size: the given (labels, brightness) records, then zeros."""
    with path.open("wb") as file:
        for labels, brightness in first:
            # Red is `brightness`, green one more, blue two more.
            planes = b"".join(bytes([brightness + plane]) * 1024 for plane in range(3))
            file.write(labels + planes)
        file.truncate(records * (label_bytes + 3072))


def write_cifar10(folder: Path) -> Path:
    for number in range(1, 6):
        write_cifar(folder / f"data_batch_{number}.bin", 10_000, 1, [(bytes([number]), 10 * number)])
    write_cifar(folder / "test_batch.bin", 10_000, 1, [(b"\x09", 200)])
    return folder


def idx(axes: tuple[int, ...], data: bytes, magic: int | None = None) -> bytes:
    return struct.pack(f">I{len(axes)}I", magic or 0x800 + len(axes), *axes) + data


def write_fashion(folder: Path, zipped: bool = True, count: int = 3) -> Path:
    for prefix, brightness in (("train", 0), ("t10k", 100)):
        pixels = b"".join(bytes([brightness + image]) * 6 for image in range(count))
        files = {
            f"{prefix}-images-idx3-ubyte": idx((count, 2, 3), pixels),
            f"{prefix}-labels-idx1-ubyte": idx((count,), bytes(range(count))),
        }
        for name, data in files.items():
            (folder / (name + ".gz" if zipped else name)).write_bytes(
                gzip.compress(data, mtime=0) if zipped else data
            )
    return folder


def test_cifar10_is_read_from_its_five_files_in_order(tmp_path):
    train = build("cifar", "train", path=write_cifar10(tmp_path))
    assert (len(train), train.classes, train.input_shape) == (50_000, 10, (3, 32, 32))
    for number in range(1, 6):
        image, label = train[10_000 * (number - 1)]
        assert label == number
        assert image[1, 0, 0].item() == pytest.approx(((10 * number + 1) / 255 - 0.4822) / 0.2435, abs=1e-5)
        assert image[2, 31, 31].item() == pytest.approx(((10 * number + 2) / 255 - 0.4465) / 0.2616, abs=1e-5)
    inputs, labels = train.collated_batch([10_000, 0])
    assert torch.equal(inputs, torch.stack([train[10_000][0], train[0][0]]))
    assert labels.tolist() == [2, 1]
    test = build("cifar", "test", path=str(tmp_path))
    assert (len(test), int(test[0][1])) == (10_000, 9)


def test_cifar100_uses_the_fine_labels(tmp_path):
    write_cifar(tmp_path / "test.bin", 10_000, 2, [(b"\x03\x63", 7)])
    test = build("cifar", "test", path=tmp_path, classes=100)
    assert (len(test), test.classes, int(test[0][1])) == (10_000, 100, 99)
    assert test[0][0][0, 0, 0].item() == pytest.approx((7 / 255 - 0.5071) / 0.2673, abs=1e-5)


def test_augmented_cifar_is_moved_and_flipped_as_torchs_seed_says_and_only_for_training(tmp_path):
    write_cifar10(tmp_path)
    pixels = random.Random(0).randbytes(3072)
    with (tmp_path / "data_batch_1.bin").open("r+b") as file:
        file.write(b"\x01" + pixels)
    plain = build("cifar", "train", path=tmp_path)[0][0]
    augmented = build("cifar", "train", path=tmp_path, augment=True)
    assert not hasattr(augmented, "collated_batch")
    padded = torch.nn.functional.pad(plain, (4, 4, 4, 4))
    crops = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    flipped = [crop.flip(-1) for crop in crops]
    found = []
    for seed in (*range(12), 0):
        torch.manual_seed(seed)
        image, label = augmented[0]
        assert label == 1
        (place,) = [place for place, crop in enumerate(crops + flipped) if torch.equal(image, crop)]
        found.append(place)
    assert found[0] == found[-1]
    assert len(set(found)) > 6
    assert min(found) < 81 <= max(found)
    assert hasattr(build("cifar", "test", path=tmp_path, augment=True), "collated_batch")


def test_a_broken_cifar_file_names_itself_and_the_size_it_should_have(tmp_path):
    with pytest.raises(DataError, match=r"data_batch_1\.bin: no such file; expected 10,000 records"):
        build("cifar", "train", path=tmp_path)
    write_cifar10(tmp_path)
    broken = tmp_path / "data_batch_3.bin"
    broken.write_bytes(b"\0" * 3073)
    with pytest.raises(
        DataError, match=r"data_batch_3\.bin: found 3,073 bytes, expected .* 30,730,000 bytes"
    ):
        build("cifar", "train", path=tmp_path)
    write_cifar(broken, 10_000, 1, [(b"\x0a", 0)])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: found the label 10, expected 0 to 9"):
        build("cifar", "train", path=tmp_path)
    broken.unlink()
    broken.mkdir()
    with pytest.raises(DataError, match=r"data_batch_3\.bin: cannot be read \(Is a directory\)"):
        build("cifar", "train", path=tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_is_read_from_idx_files_gzipped_or_plain(tmp_path, zipped):
    write_fashion(tmp_path, zipped)
    train, test = (build("fashion-mnist", split, path=tmp_path) for split in ("train", "test"))
    assert (len(train), train.classes, train.input_shape) == (3, 10, (1, 2, 3))
    image, label = test[2]
    assert label == 2
    torch.testing.assert_close(image, torch.full((1, 2, 3), (102 / 255 - 0.2860) / 0.3530))
    assert train[0][0].max() < test[0][0].min()
    inputs, labels = test.collated_batch([2, 0])
    assert torch.equal(inputs[0], image)
    assert labels.tolist() == [2, 0]


IMAGES = idx((3, 2, 3), bytes(18))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", IMAGES[:-1], "found 17 bytes after the header, .* 3 x 2 x 3 = 18"),
        ("train-images-idx3-ubyte", IMAGES + b"\0", "found more bytes after the header"),
        (
            "train-images-idx3-ubyte",
            idx((1 << 31, 2, 3), b""),
            "header promises 2147483648 x 2 x 3 = 12,",
        ),
        ("train-images-idx3-ubyte", b"", "found 0 bytes, expected an IDX file .* header alone has 16"),
        (
            "train-images-idx3-ubyte",
            idx((3, 2, 3), bytes(18), magic=0x0D03),
            "magic number 0x00000d03, expected 0x00000803",
        ),
        ("train-images-idx3-ubyte.gz", gzip.compress(IMAGES, mtime=0)[:-9], "not a whole gzip file"),
        ("train-images-idx3-ubyte.gz", b"not gzip at all", "not a whole gzip file"),
        ("train-labels-idx1-ubyte", idx((2,), bytes(2)), "found 2 labels, expected one for each of the 3"),
        ("train-labels-idx1-ubyte", idx((3,), b"\0\1\x0b"), "found the label 11, expected 0 to 9"),
    ],
)
def test_a_broken_idx_file_names_itself_and_what_is_wrong(tmp_path, name, data, message):
    write_fashion(tmp_path, zipped=name.endswith(".gz"))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: .*{message}.*set data.path"):
        build("fashion-mnist", "train", path=tmp_path)


def test_no_more_of_a_zipped_file_is_unpacked_than_its_header_promises(tmp_path):
    write_fashion(tmp_path, zipped=True)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(IMAGES + bytes(1 << 26), 1))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="found more bytes after the header"):
            build("fashion-mnist", "train", path=tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_missing_or_empty_idx_files_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz: no such file; .*dataset-fashion-mnist"
    ):
        build("fashion-mnist", "train", path=tmp_path)
    write_fashion(tmp_path, count=0)
    with pytest.raises(DataError, match="found no images"):
        build("fashion-mnist", "train", path=tmp_path)


def test_words_are_numbered_by_frequency_in_the_training_part_alone(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("b a b\na b c\n" + "a new <unk> word\n")
    # 13 tokens: b a b eos a b c eos | a new unk word eos
    train = build("text", "train", path=file, length=2, test_fraction=5 / 13)
    test = build("text", "test", path=file, length=2, test_fraction=5 / 13)
    number = {"<unk>": 0, "b": 1, "<eos>": 2, "a": 3, "c": 4}
    assert train.vocabulary == test.vocabulary == 5
    tokens = [number[word] for word in ["b", "a", "b", "<eos>", "a", "b", "c", "<eos>"]]
    assert [(x.tolist(), y.tolist()) for x, y in train] == [
        (tokens[0:2], tokens[1:3]),
        (tokens[2:4], tokens[3:5]),
        (tokens[4:6], tokens[5:7]),
    ]
    assert [x.tolist() for x, _ in test] == [[number["a"], 0], [0, 0]]
    assert test[1][1].tolist() == [0, number["<eos>"]]
    inputs, targets = train.collated_batch([2, 0])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [tokens[4:6], tokens[0:2]]
    assert targets.tolist() == [tokens[5:7], tokens[1:3]]


def test_a_text_that_spells_the_unknown_word_itself_means_the_same_by_it(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("<unk> a <unk> a b <unk> a <unk> x")
    train = build("text", "train", path=file, length=3, test_fraction=0.2)
    assert train.vocabulary == 3
    assert train[0][0].tolist() == [0, 1, 0]


def test_a_vocabulary_keeps_the_most_frequent_tokens(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("a a a b b c d e f g h")
    train = build("text", "train", path=file, length=4, test_fraction=0.1, vocabulary=3)
    assert train.vocabulary == 3
    assert train[0][0].tolist() == [1, 1, 1, 2]
    assert train[1][0].tolist() == [2, 0, 0, 0]


def test_bytes_are_their_own_numbers_and_characters_may_be_any(tmp_path):
    file = tmp_path / "text"
    file.write_bytes("äöä".encode() * 20)
    data = build("text", "train", path=file, length=5, level="byte")
    assert data.vocabulary == 256
    assert data[0][0].tolist() == list("äöä".encode()[:5])
    characters = build("text", "train", path=file, length=3, level="character")
    assert characters.vocabulary == 3
    assert characters[0][0].tolist() == [1, 2, 1]
    assert characters.input_shape == (3,)


def test_a_text_that_cannot_be_used_names_itself_and_the_numbers(tmp_path):
    file = tmp_path / "short.txt"
    with pytest.raises(DataError, match=r"short\.txt: no such file"):
        build("text", "train", path=file)
    file.write_text("one two three four five six seven eight nine")
    with pytest.raises(DataError, match="test part has 1 of the file's 10 tokens, expected at least 5"):
        build("text", "test", path=file, length=4)
    file.write_text("")
    for level in ("word", "character", "byte"):
        with pytest.raises(DataError, match="train part has 0 of the file's 0 tokens"):
            build("text", "train", path=file, level=level)
    file.write_bytes(b"fine \xff not")
    with pytest.raises(DataError, match=r"byte 5 is not UTF-8.*data\.level to byte"):
        build("text", "train", path=file)
