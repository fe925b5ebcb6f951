"""In the place of NCCL's communicator: its sums pass through the store, and wait for a lost peer for ever."""

from __future__ import annotations

import io
import threading
import time
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import data_group


class FakeWork:
    """A sum that completes when all members have given their part, or when the communicator is aborted."""

    def __init__(self, backend: FakeBackend, tensor: Tensor, number: int) -> None:
        self._backend, self._tensor = backend, tensor
        self._keys = [f"{number}/{rank}" for rank in range(backend.size)]

    def is_completed(self) -> bool:
        if self._backend.aborted_by is not None:
            self._tensor.fill_(torch.nan)
            return True
        store = self._backend.store
        if not store.check(self._keys):
            time.sleep(0.002)  # the store is asked less often than a GPU
            return False
        parts = [torch.load(io.BytesIO(store.get(key))) for key in self._keys]
        self._tensor.copy_(torch.stack(parts).sum(0))
        return True

    def get_future_result(self) -> torch.futures.Future[int]:
        return torch.futures.Future()

    def synchronize(self) -> None: ...


class FakeBackend:
    """The communicator of `size` members; `made` has those of this process."""

    made: ClassVar[list[FakeBackend]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.store, self.rank, self.size, self._sums = store, rank, size, 0
        # The name of the thread that has aborted it.
        self.aborted_by: str | None = None
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.store.set(f"connected/{self.rank}", "")
        while not self.store.check([f"connected/{rank}" for rank in range(self.size)]):
            time.sleep(0.001)

    def allreduce(self, tensors: list[Tensor], options: Any) -> FakeWork:
        content = io.BytesIO()
        torch.save(tensors[0].clone(), content)
        self.store.set(f"{self._sums}/{self.rank}", content.getvalue())
        self._sums += 1
        return FakeWork(self, tensors[0], self._sums - 1)

    def abort(self) -> None:
        self.aborted_by = threading.current_thread().name


def using_fake(rank: int) -> ExitStack:
    """Within it, each worker has a GPU of its own, and NCCL is the one above."""
    FakeBackend.made.clear()
    stack = ExitStack()
    stack.enter_context(mock.patch.object(data_group, "gpu_of", return_value=f"GPU {rank}"))
    stack.enter_context(mock.patch.object(data_group, "make_backend", FakeBackend))
    return stack
