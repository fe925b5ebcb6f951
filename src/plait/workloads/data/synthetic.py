"""Random samples of any shape, made when read: each is a function of the seed and its index."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.stored import Sample, Split


def synthetic(
    split: Split,
    shape: tuple[int, ...],
    samples: int = 1024,
    classes: int | None = None,
    target_shape: tuple[int, ...] | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
) -> Synthetic:
    """`samples` inputs of `shape`: normal numbers, or tokens below `vocabulary`, if given.

    The target is one of `classes`, or normal numbers of `target_shape`; with neither, one of ten classes for
    numbers and, for tokens, the input one token later.
    """
    sizes = {"samples": samples, "classes": classes, "vocabulary": vocabulary}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise DataError(f"data.{name}: found {size}, expected at least 1")
    for name, axes in {"shape": shape, "target_shape": target_shape or ()}.items():
        if any(size < 1 for size in axes):
            raise DataError(f"data.{name}: found {list(axes)}, expected sizes of at least 1")
    if classes is not None and target_shape is not None:
        raise DataError("data: found both classes and target_shape, expected at most one of them")
    if classes is None and target_shape is None:
        if vocabulary is None:
            classes = 10
        elif not shape:
            raise DataError("data.shape: found no axes, expected at least the time axis of the tokens")
    return Synthetic(split, shape, samples, classes, target_shape, vocabulary, seed)


class Synthetic:
    """The data set of `synthetic`. `classes` is None if targets are numbers or tokens."""

    def __init__(
        self,
        split: Split,
        shape: tuple[int, ...],
        samples: int,
        classes: int | None,
        target_shape: tuple[int, ...] | None,
        vocabulary: int | None,
        seed: int,
    ) -> None:
        self.input_shape = shape
        self.classes = classes
        self.vocabulary = vocabulary
        self._target_shape = target_shape
        self._samples = samples
        # A hash separates the samples of neighbouring seeds and of the two splits.
        self._base = zlib.crc32(f"{seed} {split}".encode())

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        if not -self._samples <= index < self._samples:
            raise IndexError(f"index {index} in a set of {self._samples} samples")
        # Torch's CPU generator uses 32 bits of its seed.
        number = (self._base + index % self._samples) % 2**32
        generator = torch.Generator().manual_seed(number)
        if self.classes is None and self._target_shape is None:
            return self._shifted_tokens(generator)
        return self._input(generator), self._target(generator)

    def collated_batch(self, indices: list[int]) -> Sample:
        inputs, targets = zip(*(self[index] for index in indices))
        return torch.stack(inputs), torch.stack(targets)

    def _input(self, generator: torch.Generator) -> Tensor:
        if self.vocabulary is None:
            return torch.randn(self.input_shape, generator=generator)
        return torch.randint(self.vocabulary, self.input_shape, generator=generator)

    def _target(self, generator: torch.Generator) -> Tensor:
        if self.classes is not None:
            return torch.randint(self.classes, (), generator=generator)
        assert self._target_shape is not None
        return torch.randn(self._target_shape, generator=generator)

    def _shifted_tokens(self, generator: torch.Generator) -> Sample:
        assert self.vocabulary is not None
        *others, time = self.input_shape
        tokens = torch.randint(self.vocabulary, (*others, time + 1), generator=generator)
        return tokens[..., :-1], tokens[..., 1:]
