"""What lazy operations have in common: tensors that they read later, and outcomes without memory."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.fusion.dispatch import alias_links
from plait.fusion.errors import FusionError


class Watched:
    """A tensor that is read later than it is in a single model; a write to it meanwhile is refused."""

    def __init__(self, tensor: Tensor, words: str) -> None:
        """`words` say what was done with the tensor, as of a model's author."""
        self._tensor, self._words, self._mark = tensor, words, _mark(tensor)

    def unwritten(self) -> Tensor:
        """The tensor; raises FusionError if it was written to."""
        if _mark(self._tensor) != self._mark:
            raise FusionError(
                f"a tensor was written in place after it was {self._words}, before that was used; write the "
                f"in-place operation out of place"
            )
        return self._tensor


def like_of(shape: torch.Size, kind: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape that takes no memory."""
    return torch.empty((), dtype=kind, device=device).expand(shape)


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    """What changes when a tensor is written to, or gets other memory."""
    # A write through `.data` does not change the version.
    return tensor._version, tensor.data_ptr(), alias_links.writes_to(tensor)
