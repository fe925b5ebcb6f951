"""The loss of a step of a pipeline, which is known once the last stage has computed it."""

from __future__ import annotations

from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.errors import InputError


class StepLoss:
    """The mean loss of a batch, equal on all workers; reading it waits for the last stage.

    `float(loss)`, `loss.item()`, f-strings, sums and comparisons read it. A loss that is not read costs no
    wait, as a tensor on a GPU.

    Examples:
        ```py
        loss = pipe.step(x, y)  # does not wait
        print(f"{loss:.3f}")  # waits
        ```
    """

    def __init__(self, share: float | Tensor, samples: int, is_shared: bool) -> None:
        # The sum of these over workers tells whether all had the same number of samples.
        sums = [torch.as_tensor(share, dtype=torch.float64).cpu().view(1)]
        self._workers = dist.get_world_size() if is_shared else 1
        sums.append(torch.tensor([1.0, samples, samples * samples], dtype=torch.float64))
        self._sums = torch.cat(sums)
        self._samples = samples
        self._work = dist.all_reduce(self._sums, async_op=True) if is_shared else None

    def item(self) -> float:
        """The loss as a number."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        loss, workers, samples, squares = self._sums.tolist()
        if samples != workers * self._samples or squares * workers != samples * samples:
            raise InputError(
                f"step: this worker has a batch of {self._samples} samples, and the workers have "
                f"{samples / workers:g} on average; all workers call step with the same whole batch (without "
                f"a DistributedSampler, and with the same seed of the loader)"
            )
        return float(loss)

    def __float__(self) -> float:
        return self.item()

    def __add__(self, other: float) -> float:
        return self.item() + other

    __radd__ = __add__

    def __mul__(self, other: float) -> float:
        return self.item() * other

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> float:
        return self.item() / other

    def __lt__(self, other: float) -> bool:
        return self.item() < other

    def __gt__(self, other: float) -> bool:
        return self.item() > other

    def backward(self) -> Never:
        """Refused: `step` has done it."""
        raise InputError(
            "backward: step has run forward and backward and updated the weights; leave loss.backward(), "
            "optimizer.step() and zero_grad() out of the loop"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"StepLoss({self.item()})"
