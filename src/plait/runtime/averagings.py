"""The averaging that a job's `sync` asks for, over what this worker trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.cluster.mail import Mail, open_mail
from plait.cluster.presence import Presence
from plait.cluster.wire import address_towards
from plait.cluster.worker import Worker
from plait.runtime.build import Parts
from plait.sync.averaging import Averaging
from plait.sync.options import Options, PartialReduceOptions
from plait.sync.partial_reduce import PartialReduce
from plait.sync.rounds import Rules
from plait.sync.vector import Source

PREFIX = "plait/sync"
LEASE_S = 5.0


def make_averaging(worker: Worker, hosts: Sequence[str], parts: Parts, options: Options) -> Averaging:
    """How this worker averages with the others; all workers make theirs together."""
    mail, presence = _take_part(worker, hosts, getattr(options, "lease_s", LEASE_S))
    sources = sources_of(parts, getattr(options, "state", False))
    if isinstance(options, PartialReduceOptions):
        rules = Rules(options.minimum, options.window, options.patience, options.every)
        return PartialReduce(worker.store, PREFIX, mail, presence, sources, rules)
    raise AssertionError(options)


def _take_part(worker: Worker, hosts: Sequence[str], lease_s: float) -> tuple[Mail, Presence]:
    store = worker.store
    address = address_towards(store.host, store.port)
    mail = open_mail(store, PREFIX, worker.rank, hosts, address, worker.timeout_s)
    return mail, Presence(store, PREFIX, worker.rank, range(worker.world_size), lease_s)


def sources_of(parts: Parts, state: bool) -> list[Source]:
    """Weights and running statistics and, with `state`, what the optimizer keeps for each weight."""
    model, optimizer = parts.model, parts.optimizer
    fixed: list[Tensor] = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]

    def kept() -> list[Tensor]:
        return [
            value
            for parameter in model.parameters()
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        ]

    return [lambda: fixed, kept] if state else [lambda: fixed]
