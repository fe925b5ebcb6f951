"""The averaging that a sync asks for, over what this worker trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.comm.rendezvous import Rendezvous
from plait.launcher.worker_process import Worker
from plait.schema.sync_options import (
    AdPsgdOptions,
    HetPipeOptions,
    LocalSgdOptions,
    Options,
    PairAveragingOptions,
    PairSyncOptions,
    PartialReduceOptions,
    SmaOptions,
)
from plait.sync.averaging.base import AveragedState, WeightAveraging, WhenSynchronized
from plait.sync.averaging.collective_averages import LocalSgd, Sma
from plait.sync.averaging.flat_buffer import Source
from plait.sync.averaging.gossip import ad_psgd, pair_averaging
from plait.sync.averaging.mailbox import open_mailbox
from plait.sync.averaging.pair_sync import PairSync
from plait.sync.averaging.parameter_server import HetPipe
from plait.sync.averaging.partial_reduce import PartialReduce
from plait.sync.averaging.partial_reduce_rules import Rules
from plait.sync.averaging.peers import Peers, find_lost

PREFIX = "plait/sync"


@dataclass(frozen=True)
class AveragingWorkers:
    """The workers that average with each other; all of them make theirs together, each `prefix` once.

    `hosts` names the host of each, and `index` is this worker's among them. Keys under `prefix` in `store`
    are theirs, and so is the process group. `find_lost` returns the indices of workers that are lost. If
    workers `may_leave`, the others average without one that has closed its averaging, under any sync.
    """

    rendezvous: Rendezvous
    store: dist.Store
    prefix: str
    hosts: Sequence[str]
    index: int
    find_lost: Callable[[], Collection[int]]
    group: dist.ProcessGroup | None = None
    may_leave: bool = False


def workers_of(
    worker: Worker, ranks: Sequence[int], index: int, prefix: str, group: dist.ProcessGroup | None
) -> AveragingWorkers:
    """The workers of these ranks of a job, of which `worker` is the one at `index`."""
    hosts, lost = [worker.hosts[rank] for rank in ranks], find_lost(worker.memberships, ranks)
    return AveragingWorkers(worker.rendezvous, worker.store, prefix, hosts, index, lost, group)


def make_averaging(
    workers: AveragingWorkers,
    sources: Sequence[Source],
    options: Options,
    seed: int,
    *,
    overdue: float = math.inf,
    step: int = 0,
    when_synchronized: Sequence[WhenSynchronized] = (),
) -> WeightAveraging:
    """How this worker averages with the others; all call it together.

    `overdue` is that of `Rules`. The run goes on after `step` steps; `when_synchronized` is averaged when all
    synchronize.
    """
    rendezvous, prefix, group = workers.rendezvous, workers.prefix, workers.group
    index, hosts, timeout_s = workers.index, workers.hosts, rendezvous.timeout_s
    averaged = AveragedState(sources, when_synchronized)
    if isinstance(options, SmaOptions):
        return Sma(averaged, options.alpha, group)
    if isinstance(options, LocalSgdOptions):
        return LocalSgd(averaged, options, group)
    if isinstance(options, HetPipeOptions):
        mailboxes = [
            open_mailbox(rendezvous, f"{prefix}/server{i}", index, hosts) for i in range(options.servers)
        ]
        return HetPipe(mailboxes, averaged, options, timeout_s, group)
    mailbox = open_mailbox(rendezvous, prefix, index, hosts)
    peers = Peers(workers.store, prefix, mailbox, workers.find_lost, timeout_s)
    if isinstance(options, PairSyncOptions):
        # A slow or stopped partner is waited for, so that all workers have the same matchings.
        peers = replace(peers, tolerant=workers.may_leave)
        return PairSync(peers, averaged, seed, step)
    if isinstance(options, AdPsgdOptions):
        return ad_psgd(peers, averaged, seed, options.graph)
    if isinstance(options, PairAveragingOptions):
        return pair_averaging(peers, averaged, seed)
    assert isinstance(options, PartialReduceOptions)
    rules = Rules(options.minimum, options.window, options.patience, options.every, overdue)
    return PartialReduce(peers, averaged, rules)


def averages_gradients(options: Options) -> bool:
    """Whether workers average before their updates, gradients among the rest, instead of after them."""
    return isinstance(options, PartialReduceOptions) and options.average == "gradients"


def sources_from(
    weights: list[Parameter], buffers: Sequence[Tensor], optimizer: torch.optim.Optimizer, options: Options
) -> list[Source]:
    """Weights, running statistics and, as `options` ask, the optimizer's state and the gradients."""
    statistics = [buffer for buffer in buffers if buffer.is_floating_point()]

    def kept() -> list[Tensor]:
        return [
            value
            for weight in weights
            for _, value in sorted(optimizer.state.get(weight, {}).items())
            if isinstance(value, Tensor) and value.shape == weight.shape
        ]

    def gradients() -> list[Tensor]:
        return [weight.grad for weight in weights if weight.grad is not None]

    return [
        lambda: weights,
        lambda: statistics,
        *([kept] if getattr(options, "state", False) else []),
        *([gradients] if averages_gradients(options) else []),
    ]
