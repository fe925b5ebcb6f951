"""How the ranks of a test world find each other, without a launcher."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from plait.comm.rendezvous import Rendezvous

SECRET = b"only for tests"


def world_store() -> dist.Store:
    """The store that this process's world met in."""
    return _get_default_store()


def rendezvous_of(
    rank: int, hosts: Sequence[str], store: dist.Store | None = None, timeout_s: float = 20.0
) -> Rendezvous:
    """The rendezvous of a rank; all call it together and meet in `store`, by default that of their world."""
    return Rendezvous(store or world_store(), SECRET, rank, hosts, timeout_s=timeout_s)
