"""The interface of data sets, and sets in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

Split = Literal["train", "test"]
Sample = tuple[Tensor, Tensor]


class MapDataset(Protocol):
    """A set of (inputs, target) pairs by index; its attributes describe it for models.

    Sets of classified images have `classes` and `input_shape`; sets of tokens have `vocabulary` and
    `input_shape`. A set with `streams` promises that sample i continues sample i - streams, and one with
    `epoch_order(seed, batch_size)` has its own shuffled order, which also depends on its `order_options`, by
    name. `fingerprint()` must be the same in a resumed run; `scores(model, device)` are printed by
    `plait evaluate`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Tensor]: ...


class Fingerprinted:
    """A set whose numbers refer to something that `fingerprint()` identifies, such as a vocabulary."""

    _fingerprint: str | None = None

    def fingerprint(self) -> str | None:
        return self._fingerprint


def is_stream(dataset: Any) -> bool:
    """Whether the set defines the order of samples: torch's IterableDataset, or only `__iter__`."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


class Images:
    """Classified images, held as bytes (sample, channel, row, column) and normalised when read.

    `white` is the brightest byte; `mean` and `std` are per channel, of brightness in [0, 1].
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        white: int = 255,
    ) -> None:
        self.classes = classes
        self.input_shape = tuple(pixels.shape[1:])
        self._pixels = pixels
        self._labels = labels.long()
        self._mean = torch.tensor(mean).mul(white).view(-1, 1, 1)
        self._std = torch.tensor(std).mul(white).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return self._normalise(self._pixels[index]), self._labels[index]

    def collated_batch(self, indices: list[int]) -> Sample:
        chosen = torch.tensor(indices, dtype=torch.long)
        return self._normalise(self._pixels[chosen]), self._labels[chosen]

    def _normalise(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self._mean) / self._std


class ShiftedImages:
    """`images`, each randomly shifted by up to `padding` pixels and flipped with probability 1/2.

    Pixels from outside of the image have the mean colour.
    """

    def __init__(self, images: Images, padding: int = 4) -> None:
        self.classes = images.classes
        self.input_shape = images.input_shape
        self._images = images
        self._padding = padding

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Sample:
        image, label = self._images[index]
        _, height, width = image.shape
        top, left = torch.randint(2 * self._padding + 1, (2,)).tolist()
        padded = F.pad(image, (self._padding,) * 4)
        moved = padded[:, top : top + height, left : left + width]
        return (moved.flip(-1) if torch.rand(()) < 0.5 else moved), label


class Windows(Fingerprinted):
    """A text cut into windows of `length` tokens; the target is the window one token later."""

    def __init__(self, tokens: Tensor, length: int, vocabulary: int, fingerprint: str | None = None) -> None:
        count = (len(tokens) - 1) // length
        self.vocabulary = vocabulary
        self._fingerprint = fingerprint
        self.input_shape = (length,)
        self._inputs = tokens[: count * length].view(count, length)
        self._targets = tokens[1 : count * length + 1].view(count, length)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Sample:
        return self._inputs[index].long(), self._targets[index].long()

    def collated_batch(self, indices: list[int]) -> Sample:
        chosen = torch.tensor(indices, dtype=torch.long)
        return self._inputs[chosen].long(), self._targets[chosen].long()
