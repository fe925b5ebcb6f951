"""HetPipe's parameter server: workers push the change of a wave and pull, at most D waves ahead of others.

A few workers each serve a part of the weights, about equal in bytes. They serve in a thread, overlapped with
training, or, dedicated, do not train. Every server has a separate mailbox, so that it can answer while its
worker computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from plait.comm.tags import Tag
from plait.core.errors import LostPeer, PeerError
from plait.schema.sync_options import HetPipeOptions
from plait.sync.averaging.base import AllOrNone, AveragedState
from plait.sync.averaging.flat_buffer import FlatBuffer, Source, distance
from plait.sync.averaging.group_graph import shards
from plait.sync.averaging.mailbox import Mailbox

LOOK_S = 0.02


def held_up_by(clocks: Mapping[int, int], done: Collection[int], worker: int, staleness: int) -> list[int]:
    """The workers that are too far behind for `worker` to continue; those in `done` do not count."""
    return [
        other for other, clock in clocks.items() if other not in done and clocks[worker] - clock > staleness
    ]


def serving(workers: int, servers: int, dedicated: bool) -> range:
    """The ranks of the servers: the first, which also train, or the last if they are dedicated."""
    return range(workers - servers, workers) if dedicated else range(servers)


class ServedWeights:
    """One part of the weights, and the clock of each worker; `idle` ones push only at the end of a segment.

    A worker that has pushed gets the weights of the moment from which it has to wait for no other worker,
    even if others have already pushed again when it pulls them. A segment ends with the last push of the
    last worker. It never blocks, and is used by one thread at a time.
    """

    def __init__(
        self, flats: Sequence[Tensor], workers: int, staleness: int, idle: Collection[int] = ()
    ) -> None:
        self._flats = [flat.clone() for flat in flats]
        self._idle = frozenset(idle)
        self._share = 1.0 / (workers - len(self._idle))
        self._staleness = staleness
        self._clocks = dict.fromkeys(range(workers), 0)
        self._done: set[int] = set()
        # The workers that have pushed and wait, and the weights of those that do not have to wait any longer.
        self._waiting: set[int] = set()
        self._ready: dict[int, list[Tensor]] = {}

    def push(self, worker: int, changes: Sequence[Tensor], last: bool) -> None:
        """Add the changes of a wave of `worker`, the `last` of its segment or not."""
        if any(weights is self._flats for weights in self._ready.values()):
            # Others have yet to pull the weights as they were before this push.
            self._flats = [flat.clone() for flat in self._flats]
        for flat, change in zip(self._flats, changes):
            flat.add_(change, alpha=self._share)
        self._clocks[worker] += 1
        self._waiting.add(worker)
        if last:
            self._done.add(worker)
        released = [each for each in self._waiting if not self.awaited(each)]
        self._waiting.difference_update(released)
        self._ready.update(dict.fromkeys(released, self._flats))
        if len(self._done) == len(self._clocks):
            # All workers are done: reset for the next segment.
            self._clocks = dict.fromkeys(self._clocks, 0)
            self._done.clear()

    def awaited(self, worker: int) -> list[int]:
        """The workers whose pushes `worker` has to wait for."""
        if worker not in self._waiting:
            return []
        if worker in self._done:
            return sorted(self._clocks.keys() - self._done)
        return held_up_by(self._clocks, self._done | self._idle, worker, self._staleness)

    def waits_for_training(self, worker: int) -> bool:
        """Whether `worker`, which does not train, waits for others that do, none of which is done."""
        return worker in self._idle and self._done <= self._idle

    def pull(self, worker: int) -> list[Tensor] | None:
        """The weights for `worker`, which has pushed; None while it has to wait."""
        return self._ready.pop(worker, None)


class Server:
    """Serves one part of the weights to all workers, in a thread."""

    def __init__(self, mailbox: Mailbox, weights: ServedWeights) -> None:
        self._mailbox = mailbox
        self._weights = weights
        self._changed = threading.Condition()
        # The numbers of the pushes that are not answered yet.
        self._waiting: dict[int, int] = {}
        # When the thread ends at the latest; None until the server is closed.
        self._end: float | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="plait-server", daemon=True)
        self._thread.start()

    def push(self, changes: Sequence[Tensor], last: bool) -> None:
        """Push the changes of the server's own worker; other workers use the mailbox."""
        with self._changed:
            self._weights.push(self._mailbox.rank, changes, last)

    def pull(self, deadline_s: float) -> list[Tensor]:
        """The weights for the server's own worker, which has pushed."""
        rank = self._mailbox.rank
        with self._changed:
            end = time.monotonic() + deadline_s
            while (weights := self._weights.pull(rank)) is None:
                if self._failure is not None:
                    raise self._failure
                self._check_there(self._weights.awaited(rank))
                if self._weights.waits_for_training(rank):
                    # Their segment may take any time; one that hangs is found by others, or by its host.
                    end = time.monotonic() + deadline_s
                if time.monotonic() > end:
                    awaited = self._weights.awaited(rank)
                    raise PeerError(
                        f"worker {rank} waited {deadline_s:g} s for workers {awaited} to push; they hang, or "
                        f"are slower than parallel.timeout_s allows",
                        LostPeer.SILENT,
                        awaited[0] if awaited else None,
                    )
                self._changed.wait(min(1.0, deadline_s))
            return [flat.clone() for flat in weights]

    def _check_there(self, awaited: Sequence[int]) -> None:
        """Raise PeerError if an awaited worker is gone."""
        for peer in awaited:
            if peer != self._mailbox.rank and self._mailbox.is_gone(peer):
                raise PeerError(f"worker {peer}, whose pushes are waited for, is gone", LostPeer.GONE, peer)

    def close(self, patience_s: float = 0.0) -> None:
        """End the thread once all other workers have closed the mailbox, or after `patience_s`."""
        self._end = time.monotonic() + patience_s
        self._thread.join()

    def _is_over(self) -> bool:
        if self._end is None:
            return False
        return time.monotonic() >= self._end or all(map(self._mailbox.is_gone, self._mailbox.peers()))

    def _serve(self) -> None:
        try:
            while not self._is_over():
                self._mailbox.wait(LOOK_S)
                with self._changed:
                    self._take_pushes()
                    self._answer()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _take_pushes(self) -> None:
        for peer in self._mailbox.peers():
            while (message := self._mailbox.take(peer, Tag.PUSH)) is not None:
                last = message.content.note == "last"
                self._weights.push(peer, [t for t in message.content.tensors if t is not None], last)
                self._changed.notify_all()
                self._waiting[peer] = message.content.number
                message.release()

    def _answer(self) -> None:
        """Send the weights to the workers that do not have to wait any longer."""
        for worker, number in list(self._waiting.items()):
            if (weights := self._weights.pull(worker)) is not None:
                self._mailbox.send(worker, Tag.PULL, number, weights)
                del self._waiting[worker]
            else:
                self._check_there(self._weights.awaited(worker))


class HetPipe(AllOrNone):
    """Pushes the change of each wave of `wave` updates to the servers and continues from their weights.

    There is one server per mailbox: the first workers or, if `dedicated`, the last, which do not train.
    """

    def __init__(
        self,
        mailboxes: Sequence[Mailbox],
        averaged: AveragedState,
        options: HetPipeOptions,
        deadline_s: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(dist.get_world_size(group))
        self._group = group
        self._mailboxes = list(mailboxes)
        self._rank = mailboxes[0].rank
        self._wave = options.wave
        self._deadline_s = deadline_s
        self._averaged = averaged
        weights, *rest = averaged.sources
        kept = shards([t.numel() * t.element_size() for t in weights()], len(mailboxes))
        self._parts = [FlatBuffer(_only(weights, indices)) for indices in kept]
        self._rest = FlatBuffer(*rest, *averaged.when_synchronized)
        self._bases = [[flat.clone() for flat in part.gather()] for part in self._parts]
        self._servers = serving(self._size, len(mailboxes), options.dedicated)
        self._idle = self._servers if options.dedicated else range(0)
        self._server: Server | None = None
        if self._rank in self._servers:
            part = self._servers.index(self._rank)
            served = ServedWeights(self._bases[part], self._size, options.staleness, self._idle)
            self._server = Server(mailboxes[part], served)
        self._since = self._number = 0
        # Whether all workers have pushed their last change, so that others may only have to pull.
        self._is_settled = True

    def after_update(self) -> None:
        """Push and pull at the end of a wave."""
        self._since += 1
        if self._since >= self._wave:
            self._exchange(last=False)

    def synchronize(self) -> None:
        """Push the last change, wait until all workers have, and pull; the rest of the state is averaged."""
        with self._averaged.synchronizing():
            before = [[flat.clone() for flat in part.gather()] for part in self._parts]
            self._exchange(last=True)
            moved = [distance(part.flats, old) ** 2 for part, old in zip(self._parts, before)]
            self.stats.distances.append(sum(moved) ** 0.5)
            for flat in self._rest.gather():
                if self._rank in self._idle:
                    # It has taken no steps, so its state is old.
                    flat.zero_()
                dist.all_reduce(flat, group=self._group)
                flat /= self._size - len(self._idle)
            self._rest.scatter()

    def close(self) -> None:
        served = None if self._server is None else self._servers.index(self._rank)
        for part, mailbox in enumerate(self._mailboxes):
            if part != served:
                mailbox.close()
        if self._server is not None and served is not None:
            # If a worker was lost, the others may wait for this one's changes, which never come.
            self._server.close(self._deadline_s if self._is_settled else 0.0)
            self._mailboxes[served].close()

    def _exchange(self, last: bool) -> None:
        self._is_settled = False
        with self.stats.waiting():
            changes = [
                [flat - base for flat, base in zip(part.gather(), bases)]
                for part, bases in zip(self._parts, self._bases)
            ]
            # To all servers before any answer is waited for: others may need them for theirs.
            for server, mailbox, change in zip(self._servers, self._mailboxes, changes):
                if self._server is not None and server == self._rank:
                    self._server.push(change, last)
                else:
                    mailbox.send(server, Tag.PUSH, self._number, change, "last" if last else "")
            parts = list(range(len(changes)))
            if self._rank in self._idle:
                # It waits in its own part for those that train; others answer it at once then.
                parts.sort(key=lambda part: self._servers[part] != self._rank)
            for part in parts:
                self._take(part, self._pull(part))
        self._number += 1
        self._since = 0
        self._is_settled = last
        self.stats.groups += 1
        self.stats.members += self._size
        self.stats.bytes_sent = sum(mailbox.bytes_sent for mailbox in self._mailboxes)

    def _pull(self, part: int) -> list[Tensor]:
        server, mailbox = self._servers[part], self._mailboxes[part]
        if self._server is not None and server == self._rank:
            return self._server.pull(self._deadline_s)
        end = time.monotonic() + self._deadline_s
        while (message := mailbox.take(server, Tag.PULL)) is None:
            if mailbox.is_gone(server):
                raise PeerError(f"worker {server}, a parameter server, is gone", LostPeer.GONE, server)
            if time.monotonic() > end:
                raise PeerError(
                    f"worker {self._rank} waited {self._deadline_s:g} s for the parameter server of worker "
                    f"{server}; a worker hangs, or is slower than parallel.timeout_s allows",
                    LostPeer.SILENT,
                )
            mailbox.wait(LOOK_S)
        weights = [t.clone() for t in message.content.tensors if t is not None]
        message.release()
        return weights

    def _take(self, part: int, weights: Sequence[Tensor]) -> None:
        vector = self._parts[part]
        for flat, base, new in zip(vector.flats, self._bases[part], weights):
            flat.copy_(new)
            base.copy_(new)
        vector.scatter()


def _only(source: Source, indices: Sequence[int]) -> Source:
    def chosen() -> list[Tensor]:
        tensors = source()
        return [tensors[i] for i in indices]

    return chosen
