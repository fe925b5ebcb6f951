"""Sums of GPU tensors over NCCL among workers that may be lost at any time.

NCCL waits for a lost peer for ever, and a communicator that has lost one can only be aborted, from another
thread. So the members of a version agree and exchange values over gloo, and make a second communicator for
the sums of gradients. The thread that learns of a loss aborts it; nothing here waits without a deadline. If a
member is lost while the communicator is made, a thread stays behind: NCCL cannot interrupt it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from plait.comm.groups import interruptible
from plait.comm.links.nccl import nccl_name_of
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import LostPeer, PeerError, PlaitError
from plait.core.shown import shortened

log = logging.getLogger(__name__)
# How often a wait for the GPU looks whether a member is lost.
LOOK_S = 0.00005
# The longest that connecting may take before gloo sums instead.
CONNECT_S = 60.0
# Without its watchdog, which ends the process if a peer is lost: waits for sums look for errors themselves.
_VARIABLES = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class DataGroup:
    """The communicator of some members; `abort` ends all waits for its sums."""

    def __init__(self, rendezvous: Rendezvous, ranks: Sequence[int]) -> None:
        self._rendezvous, self.ranks = rendezvous, tuple(ranks)
        self._backend: Any = None
        self._is_aborted = False

    def connect(self, device: torch.device) -> None:
        """Make the communicator, and sum for the first time; all members call it together."""
        meeting, ranks = self._rendezvous, self.ranks
        # Shorter than the wait of a member that failed at once for the outcome of the others.
        seconds = min(CONNECT_S, meeting.timeout_s / 3)
        store = dist.PrefixStore(f"{_place(meeting, ranks)}/nccl", meeting.store)
        backend = self._backend = make_backend(
            store, ranks.index(meeting.rank), len(ranks), meeting.timeout_s
        )
        if self._is_aborted:
            self.abort()
        interruptible(lambda _: backend.eager_connect_single_device(device), meeting, seconds)(0)
        ones = torch.ones(1, device=device)
        self._await(self._start(ones), seconds)
        if ones.item() != len(ranks):
            raise PlaitError(f"NCCL summed {len(ranks)} ones to {ones.item():g}")

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start summing `tensor` over the members, in place, after what this thread has queued on the GPU.

        The returned function waits for the sum; a loss, an error of NCCL or the deadline ends the wait.
        """
        return partial(self._await, self._start(tensor), self._rendezvous.timeout_s)

    def _start(self, tensor: Tensor) -> Any:
        options, backend = dist.AllreduceOptions(), self._backend
        if self._is_aborted:
            raise self._lost("they were ended", LostPeer.GONE)
        return backend.allreduce([tensor], options)

    def _await(self, work: Any, seconds: float) -> None:
        check, end = self._rendezvous.check, time.monotonic() + seconds
        while not work.is_completed():
            if check is not None:
                check()
            if time.monotonic() > end:
                self.abort()
                raise self._lost(f"no result within {seconds:g} s", LostPeer.SILENT)
            time.sleep(LOOK_S)
        # An aborted sum completes, too, and has no result. Who aborts has learned of the loss before.
        if check is not None:
            check()
        if self._is_aborted or _has_failed(work):
            self.abort()
            raise self._lost("NCCL error: a peer or the network to it is gone", LostPeer.GONE)
        work.synchronize()

    def abort(self) -> None:
        """End the sums here, without waiting; may be called from any thread, and again."""
        self._is_aborted = True
        backend, self._backend = self._backend, None
        if backend is not None:
            # It may block: NCCL joins its threads.
            threading.Thread(target=_abort, args=(backend,), name="plait-abort", daemon=True).start()

    def _lost(self, why: str, kind: LostPeer) -> PeerError:
        others = [rank for rank in self.ranks if rank != self._rendezvous.rank]
        return PeerError(f"sums of worker {self._rendezvous.rank} with workers {others}: {why}", kind)


def find_data_group(rendezvous: Rendezvous, ranks: Sequence[int], device: torch.device) -> DataGroup | None:
    """The communicator of the members `ranks`, whose tensors are on `device`; all of them call it together.

    None if gloo sums for them: in a world whose members are fixed, which has NCCL itself, without NCCL, and
    where not every member has a GPU to itself. It is made once for a version of the members.
    """
    known = rendezvous.data_groups
    key: tuple[int | str, ...] = (rendezvous.worlds, device.type, *ranks)
    if rendezvous.check is None or len(ranks) < 2:
        return None
    if key not in known:
        gpus = _exchange(rendezvous, ranks, f"{device.type}/gpu", gpu_of(device))
        known[key] = None
        if "" not in gpus and len(set(gpus)) == len(ranks):
            # Known before it is connected: a loss meanwhile aborts it.
            made = known[key] = DataGroup(rendezvous, ranks)
            failures = _exchange(rendezvous, ranks, f"{device.type}/failed", _failure_of(made, device))
            if any(failures):
                made.abort()
                known[key] = None
                log.warning(
                    "NCCL could not connect workers %s; gloo sums their gradients, through the host: %s",
                    list(ranks),
                    next(filter(None, failures)),
                )
    group: DataGroup | None = known[key]
    return group


def await_others(rendezvous: Rendezvous) -> None:
    """Wait until those that sum with this process have completed their sums, before it ends.

    NCCL may still send what others need for a sum that is complete here.
    """
    for group in [each for each in rendezvous.data_groups.values() if each is not None]:
        _exchange(rendezvous, group.ranks, "end", "")


def abort_all(rendezvous: Rendezvous) -> None:
    """Abort the communicators of a version, which its members leave or have lost one of."""
    for group in list(rendezvous.data_groups.values()):
        if group is not None:
            group.abort()


def gpu_of(device: torch.device) -> str:
    """The identity of the worker's GPU for NCCL; empty if there is no GPU, or no NCCL."""
    return nccl_name_of(device) if device.type == "cuda" and dist.is_nccl_available() else ""


def make_backend(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """A communicator of NCCL's that torch's registry of process groups does not know.

    `destroy_process_group` would wait for its sums.
    """
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(range(size))
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ |= _VARIABLES
    try:
        return distributed_c10d.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _failure_of(group: DataGroup, device: torch.device) -> str:
    """Why the members are not connected; empty if they are."""
    try:
        group.connect(device)
    except (RuntimeError, PlaitError) as failure:
        return shortened(str(failure), 300) or type(failure).__name__
    return ""


def _exchange(rendezvous: Rendezvous, ranks: Sequence[int], what: str, value: str) -> list[str]:
    """What each member gives; a loss meanwhile ends the wait."""
    place = f"{_place(rendezvous, ranks)}/{what}"
    store, keys = rendezvous.store, [f"{place}/{rank}" for rank in ranks]
    store.set(f"{place}/{rendezvous.rank}", value)
    store.wait(keys, timedelta(seconds=rendezvous.timeout_s))
    return [store.get(key).decode() for key in keys]


def _place(rendezvous: Rendezvous, ranks: Sequence[int]) -> str:
    return f"plait/sums/{rendezvous.worlds}/{','.join(map(str, ranks))}"


def _has_failed(work: Any) -> bool:
    """Whether NCCL has reported an error of the sum; without the watchdog, successes are not reported."""
    result = work.get_future_result()
    return bool(result.done() and result.value())


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()
