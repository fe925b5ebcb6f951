"""The job's store as a worker has it: with the interface of torch's `Store`, which process groups need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from plait.comm.store import StoreClient, StoreTimeout

# How often a wait in the store checks whether a member was lost.
LOOK_S = 0.1


class JobStore(StoreClient, dist.Store):
    """`client` with the interface of torch's `Store`: all its keys, or those below `prefix`.

    `check` is called during waits and raises if a member is lost, which would never set the key.
    """

    def __init__(
        self, client: StoreClient, prefix: str = "", check: Callable[[], None] | None = None
    ) -> None:
        dist.Store.__init__(self)
        vars(self).update(vars(client))  # its connections are shared
        self._prefix = prefix
        self._check = check

    def get(self, key: str, seconds: float | None = None) -> bytes:
        if self._check is not None:
            self.wait([key])
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        seconds = self.timeout_s if timeout is None else timeout.total_seconds()
        end = time.monotonic() + seconds
        while self._check is not None and seconds > LOOK_S:
            self._check()
            with contextlib.suppress(StoreTimeout):
                super().wait(keys, LOOK_S)
                return
            seconds = end - time.monotonic()
        super().wait(keys, max(0.0, seconds))

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    # Torch calls these by their C++ names.
    deleteKey = StoreClient.delete_key
    getNumKeys = StoreClient.num_keys
    setTimeout = set_timeout
