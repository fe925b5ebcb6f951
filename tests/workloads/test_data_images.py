"""Folders of images, written here as real JPEG and PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from plait.core.errors import DataError
from plait.workloads.data import build
from plait.workloads.data.image_folder import random_box

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_folder(root: Path) -> Path:
    write_image(root / "train" / "n02" / "b.JPEG", (0, 0, 255))
    write_image(root / "train" / "n01" / "a.JPEG", (255, 0, 0))
    write_image(root / "train" / "n01" / "c.png", (250, 0, 0))
    write_image(root / "val" / "n02" / "v.jpg", (0, 0, 255))
    (root / "train" / "n01" / "notes.txt").write_text("not an image")
    return root


def brightness(image: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation."""
    return image * STD + MEAN


def test_classes_are_the_training_folders_in_order_and_other_files_are_left_out(tmp_path):
    train = build("image-folder", "train", path=write_folder(tmp_path), size=16)
    assert (len(train), train.classes, train.input_shape) == (3, 2, (3, 16, 16))
    assert [int(label) for _, label in train] == [0, 0, 1]
    image = train[2][0]
    assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
    torch.testing.assert_close(
        brightness(image).mean((1, 2)), torch.tensor([0.0, 0.0, 1.0]), atol=0.02, rtol=0
    )


def test_a_validation_image_has_the_number_its_class_has_in_training(tmp_path):
    test = build("image-folder", "test", path=write_folder(tmp_path), size=16)
    assert (len(test), test.classes, int(test[0][1])) == (1, 2, 1)


def test_a_test_image_is_resized_by_its_shorter_side_and_cropped_at_the_centre(tmp_path):
    write_folder(tmp_path)
    across = np.linspace(0, 255, 512).astype(np.uint8)
    pixels = np.broadcast_to(across[None, :, None], (256, 512, 3))
    Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / "val" / "n02" / "v.png")
    image = build("image-folder", "test", path=tmp_path, size=224)[1][0]
    expected = torch.from_numpy(across[144:368].copy()).float() / 255
    torch.testing.assert_close(brightness(image), expected.expand(3, 224, 224), atol=0.01, rtol=0)
    # A smaller size shows the same part.
    small = build("image-folder", "test", path=tmp_path, size=56)[1][0]
    torch.testing.assert_close(brightness(small)[0, 0], expected.view(56, 4).mean(1), atol=0.01, rtol=0)


def test_training_images_vary_as_torchs_seed_says_and_test_images_never(tmp_path):
    write_folder(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    for folder in ("train", "val"):
        Image.fromarray(noise).save(tmp_path / folder / "n02" / "z.png")
    train = build("image-folder", "train", path=tmp_path, size=16)
    test = build("image-folder", "test", path=tmp_path, size=16)

    def draw(dataset, seed):
        torch.manual_seed(seed)
        return dataset[len(dataset) - 1][0]

    assert torch.equal(draw(train, 0), draw(train, 0))
    assert not torch.equal(draw(train, 0), draw(train, 1))
    assert torch.equal(draw(test, 0), draw(test, 1))
    assert not hasattr(train, "collated_batch")


def test_half_of_the_training_images_are_flipped(tmp_path):
    write_folder(tmp_path)
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[:] = np.arange(40, dtype=np.uint8)[None, :, None] * 6
    Image.fromarray(pixels).save(tmp_path / "train" / "n02" / "z.png")
    train = build("image-folder", "train", path=tmp_path, size=16)
    torch.manual_seed(0)
    flipped = [bool(image[0, 0, 0] > image[0, 0, -1]) for image in (train[3][0] for _ in range(60))]
    assert 15 < sum(flipped) < 45


@pytest.mark.parametrize(("width", "height"), [(40, 30), (7, 500), (500, 7), (1, 1)])
def test_a_random_part_lies_within_the_image_and_has_the_published_shape(width, height):
    torch.manual_seed(0)
    flips, shares = [], []
    for _ in range(200):
        (left, top, right, bottom), flip = random_box(width, height)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        # Rounding to whole pixels may move an edge by half of one.
        assert (right - left - 1) / (bottom - top + 1) <= 4 / 3
        assert (bottom - top - 1) / (right - left + 1) <= 4 / 3
        flips.append(flip)
        shares.append((right - left) * (bottom - top) / (width * height))
    assert 60 < sum(flips) < 140
    if (width, height) == (40, 30):
        assert min(shares) < 0.15
        assert max(shares) > 0.8


def test_grey_and_transparent_images_come_as_three_channels(tmp_path):
    write_folder(tmp_path)
    Image.new("L", (20, 20), 128).save(tmp_path / "val" / "n02" / "grey.jpg")
    Image.new("RGBA", (20, 20), (10, 20, 30, 40)).save(tmp_path / "val" / "n02" / "clear.png")
    Image.new("P", (20, 20)).save(tmp_path / "val" / "n02" / "palette.png")
    test = build("image-folder", "test", path=tmp_path, size=8)
    assert [tuple(image.shape) for image, _ in test] == [(3, 8, 8)] * 4


@pytest.mark.parametrize("suffix", ["JPEG", "png"])
@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_truncated_or_empty_image_names_itself_when_it_is_read(tmp_path, suffix, kept):
    write_folder(tmp_path)
    broken = tmp_path / "val" / "n02" / f"a.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(broken)
    data = broken.read_bytes()
    broken.write_bytes(data[: int(len(data) * kept)])
    test = build("image-folder", "test", path=tmp_path, size=8)
    with pytest.raises(DataError, match=rf"n02/a\.{suffix}: cannot be decoded .*replace or remove"):
        test[0]


def test_a_broken_image_names_itself_through_the_workers_of_a_loader(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "val" / "n02" / "a.png").write_bytes(b"nothing")
    test = build("image-folder", "test", path=tmp_path, size=8)
    with pytest.raises(DataError, match=r"n02/a\.png: cannot be decoded"):
        list(DataLoader(test, batch_size=2, num_workers=1, timeout=60))


def test_a_folder_with_another_layout_is_refused_with_the_layout_expected(tmp_path):
    layout = r"expected ROOT/train/CLASS/\*\.JPEG"
    with pytest.raises(DataError, match=rf"train: cannot be read \(No such file or directory\); {layout}"):
        build("image-folder", "train", path=tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=rf"train: found no class folders; {layout}"):
        build("image-folder", "train", path=tmp_path)
    (tmp_path / "train" / "n01").mkdir()
    with pytest.raises(DataError, match=r"train/n01: found no images \(\.jpeg, \.jpg, \.png\)"):
        build("image-folder", "train", path=tmp_path)


def test_a_class_that_training_does_not_know_is_refused(tmp_path):
    write_folder(tmp_path)
    write_image(tmp_path / "val" / "n03" / "x.JPEG", (1, 2, 3))
    with pytest.raises(DataError, match=r"val/n03: there is no such class in .*train"):
        build("image-folder", "test", path=tmp_path)
