"""Folders of images in ImageNet's layout: ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.core.names import check_extra
from plait.workloads.data.stored import Sample, Split

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[float, float, float, float]

_SUFFIXES = (".jpeg", ".jpg", ".png")
_LAYOUT = "expected ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG, with data.path naming ROOT"
_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def image_folder(split: Split, path: Path, size: int = 224) -> ImageFolder:
    """The images under `path`, `size` x `size` pixels, decoded when read; `test` reads the folder `val`.

    Training images are cropped, resized and flipped at random; test images are resized and cropped at
    the centre. Classes are the folders under train, in alphabetical order, numbered from 0.
    """
    check_extra("PIL", "data.kind: image-folder", DataError)
    if size < 1:
        raise DataError(f"data.size: found {size}, expected at least 1 pixel")
    names = _class_names(path / "train")
    folder = path / ("train" if split == "train" else "val")
    present = names if split == "train" else _class_names(folder)
    strangers = sorted(set(present) - set(names))
    if strangers:
        raise DataError(f"{folder / strangers[0]}: there is no such class in {path / 'train'}; {_LAYOUT}")
    numbers = {name: number for number, name in enumerate(names)}
    files = [(file, numbers[name]) for name in present for file in _images_in(folder / name)]
    return ImageFolder(files, len(names), size, random_box if split == "train" else _centre_box)


class ImageFolder:
    """Image files and their classes; `choose_box` selects the crop of an image."""

    def __init__(
        self,
        files: list[tuple[str, int]],
        classes: int,
        size: int,
        choose_box: Callable[[int, int], tuple[Box, bool]],
    ) -> None:
        self.classes = classes
        self.input_shape = (3, size, size)
        self._files = files
        self._size = size
        self._choose_box = choose_box

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        file, label = self._files[index]
        image = _decode(file)
        box, flip = self._choose_box(*image.size)
        pixels = _to_tensor(_resize(image, self._size, box))
        normalised = (pixels / 255 - _MEAN) / _STD
        return (normalised.flip(-1) if flip else normalised), torch.tensor(label)


def _class_names(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in _entries(folder) if entry.is_dir())
    if not names:
        raise DataError(f"{folder}: found no class folders; {_LAYOUT}")
    return names


def _images_in(folder: Path) -> list[str]:
    # As text, because a million Path objects take several times the memory.
    files = sorted(entry.path for entry in _entries(folder) if entry.name.lower().endswith(_SUFFIXES))
    if not files:
        raise DataError(f"{folder}: found no images ({', '.join(_SUFFIXES)}); add some or remove the folder")
    return files


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as failure:
        raise DataError(f"{folder}: cannot be read ({failure.strerror}); {_LAYOUT}") from None


def _decode(file: str) -> Image:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    # Pillow raises SyntaxError for a broken PNG, and an error for decompression bombs.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as failure:
        raise DataError(
            f"{file}: cannot be decoded ({failure}); expected a whole JPEG or PNG; replace or remove the file"
        ) from failure


def _resize(image: Image, size: int, box: Box) -> Image:
    from PIL.Image import Resampling

    return image.resize((size, size), Resampling.BILINEAR, box=box)


def _to_tensor(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def random_box(width: int, height: int) -> tuple[Box, bool]:
    """A random crop of 8-100% of the image, of an aspect between 3:4 and 4:3, and whether to flip it.

    This is the crop of Szegedy et al. (2015). If ten tries fail, as for a very long image, it is the centre.
    """
    flip = bool(torch.rand(()) < 0.5)
    for _ in range(10):
        share, aspect, across, down = torch.rand(4, dtype=torch.float64).tolist()
        area = width * height * (0.08 + 0.92 * share)
        ratio = math.exp(math.log(4 / 3) * (2 * aspect - 1))
        part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < part_width <= width and 0 < part_height <= height:
            left = int(across * (width - part_width + 1))
            top = int(down * (height - part_height + 1))
            return (left, top, left + part_width, top + part_height), flip
    side_width, side_height = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return _centred(width, height, side_width, side_height), flip


def _centre_box(width: int, height: int) -> tuple[Box, bool]:
    """The central square of 224/256 of the shorter side: what resizing to 256 and cropping 224 keeps."""
    side = min(width, height) * 224 / 256
    return _centred(width, height, side, side), False


def _centred(width: int, height: int, part_width: float, part_height: float) -> Box:
    left, top = (width - part_width) / 2, (height - part_height) / 2
    return (left, top, left + part_width, top + part_height)
