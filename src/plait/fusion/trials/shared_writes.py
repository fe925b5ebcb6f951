"""What trials that run one by one write to the tensors that they share, and how it is found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from plait.fusion.errors import FusionError
from plait.fusion.sharing import equal_values

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Sums over the bits of tensors, which a write through `.data` changes too; None if none can be read."""
    if not tensors or any(isinstance(x, FakeTensor) or x.is_meta for x in tensors):
        return None
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        sums = [_words(x.detach()).sum(dtype=torch.int64).to(tensors[0].device) for x in tensors]
    values: list[int] = torch.stack(sums).tolist()
    return values


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers; of 64 bits where it divides into such, whose sum is fastest."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() % 8 == 0
    if whole and tensor.storage_offset() * tensor.element_size() % 8 == 0:
        return tensor.flatten().view(torch.int64)
    return tensor.view(_WORDS[tensor.element_size()])


class SharedArguments:
    """The plain tensors among the arguments of a module that runs once for each trial.

    A trial whose module writes to one must not see what another wrote. `copies`: whether it does; None if
    unknown, so that the first forward in a mode finds it out.
    """

    def __init__(self, plain: Sequence[Tensor], copies: bool | None) -> None:
        self._plain = list(plain)
        self.copies = copies
        self._finds_out = copies is None
        self._pristine = [leaf.clone() for leaf in plain] if copies is None else []
        counted = not any(leaf.is_inference() for leaf in plain)  # which have no version counters
        self._versions = [leaf._version for leaf in plain] if counted else None
        self._written: list[list[Tensor]] = []

    def of_trial(self, number: int, count: int) -> dict[int, Tensor]:
        """What one trial gets in the place of the tensors, by their ids; nothing if it gets themselves."""
        # One trial may write to the tensors themselves, as a single model would.
        if not self.copies or (number == 0 if self._finds_out else number == count - 1):
            return {}
        self._written.append([leaf.clone() for leaf in (self._pristine or self._plain)])
        return dict(zip(map(id, self._plain), self._written[-1]))

    def first_has_run(self) -> None:
        if not self._finds_out or self.copies is not None:
            return
        if self._versions is not None:
            self.copies = self._versions != [leaf._version for leaf in self._plain]
        else:
            self.copies = any(not torch.equal(a, b) for a, b in zip(self._plain, self._pristine))

    def refuse_unlike(self, who: str, count: int) -> None:
        """Raise FusionError if the trials wrote unlike values: there is but one tensor to hold them."""
        late = self._versions is not None and self._versions != [leaf._version for leaf in self._plain]
        if late and count > 1 and not self.copies and not self._finds_out:
            raise FusionError(
                f"{who} writes to an argument that all trials share, and did not in the first forward",
                "run the module that calls it trial by trial: name that in fuse(..., unfused=[...])",
            )
        captures = any(x.is_cuda for x in self._plain) and torch.cuda.is_current_stream_capturing()
        if captures or any(isinstance(x, FakeTensor) for x in self._plain):
            return
        for own in self._written:
            if not all(equal_values(one, leaf) for one, leaf in zip(own, self._plain)):
                raise FusionError(
                    f"{who} writes what differs between trials into an argument that all trials share",
                    "run the module that calls it trial by trial: name that in fuse(..., unfused=[...])",
                )


def placed(values: Any, own: dict[int, Tensor]) -> Any:
    """The values with a trial's own tensors in the place of shared ones."""
    if not own:
        return values
    return pytree.tree_map(lambda value: own.get(id(value), value), values)
