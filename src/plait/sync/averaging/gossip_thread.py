"""A thread that averages while the worker trains: it answers peers at any time and asks some of them itself.

Peers read a published copy of the weights, which the thread averages. The worker computes on its own tensors
and adds the change of each update to the published copy.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.comm.links.packing import Message
from plait.comm.tags import Tag
from plait.sync.averaging.flat_buffer import FlatBuffer
from plait.sync.averaging.peers import Inbox, Peers

LOOK_S = 0.02
# A question's number: how often all have synchronized, then the count of this worker's questions.
COUNT_BITS = 32


class GossipThread:
    """Weights that peers may ask for, and the thread that serves them.

    `choose` selects the peers to ask from the live ones; with `mutual` the peer that answers takes the mean
    too. Every question is answered, so that no peer waits; the answer is empty if the two have not
    synchronized equally often, because one of them was stopped meanwhile.
    """

    def __init__(
        self,
        peers: Peers,
        vector: FlatBuffer,
        choose: Callable[[Sequence[int]], Sequence[int]],
        *,
        mutual: bool,
        seed: int,
    ) -> None:
        self._peers = peers
        self._mailbox = peers.mailbox
        self._vector = vector
        self._choose = choose
        self._mutual = mutual
        self._random = random.Random(f"{seed}/{peers.rank}")
        self._lock = threading.Lock()
        self._published = [flat.clone() for flat in vector.gather()]
        self._base = [flat.clone() for flat in self._published]
        self._synchronized = 0
        self.questions = 0
        self._pending = 0
        self._asked: _Question | None = None
        self._answers = Inbox(peers, Tag.GOSSIP_ANSWER)
        self.averages = 0
        self._run = threading.Event()
        self._parked = threading.Event()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="plait-exchange", daemon=True)
        self._run.set()
        self._thread.start()

    def update(self) -> int:
        """Add this worker's update to the published weights, continue from them, and request an average.

        Returns how many averages there have been.
        """
        if self._failure is not None:
            raise self._failure
        flats = self._vector.gather()
        with self._lock:
            for published, flat, base in zip(self._published, flats, self._base):
                published.add_(flat).sub_(base)
                flat.copy_(published)
                base.copy_(published)
            self._pending = min(self._pending + 1, 2)
            averages = self.averages
        self._vector.scatter()
        return averages

    def pause(self) -> None:
        """Pause the thread: the tensors hold the published weights, and the caller may use the mailbox."""
        self._run.clear()
        self._parked.wait()
        if self._failure is not None:
            raise self._failure
        self.update()
        self._pending, self._asked = 0, None

    def resume(self) -> None:
        """Continue from the worker's tensors; answers to earlier questions are dropped."""
        self._synchronized += 1
        for published, base, flat in zip(self._published, self._base, self._vector.gather()):
            published.copy_(flat)
            base.copy_(flat)
        self._parked.clear()
        self._run.set()

    def close(self) -> None:
        """End the thread, which is paused."""
        self._ended = True
        self._run.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._ended:
                if not self._run.is_set():
                    self._parked.set()
                    self._run.wait()
                    continue
                self._mailbox.wait(LOOK_S / 4 if self._pending and self._asked is None else LOOK_S)
                for peer in self._mailbox.peers():
                    self._answer_all(peer)
                self._receive_answer()
                self._ask()
        except BaseException as failure:
            self._failure = failure
            self._parked.set()

    def _answer_all(self, peer: int) -> None:
        while (message := self._mailbox.take(peer, Tag.GOSSIP_ASK)) is not None:
            if message.content.number >> COUNT_BITS == self._synchronized:
                self._answer(peer, message)
            else:
                self._mailbox.send(peer, Tag.GOSSIP_ANSWER, message.content.number, [])
            message.release()

    def _answer(self, peer: int, message: Message) -> None:
        with self._lock:
            self._mailbox.send(peer, Tag.GOSSIP_ANSWER, message.content.number, self._published)
            if self._mutual:
                for published, theirs in zip(self._published, message.content.tensors):
                    assert theirs is not None
                    published.lerp_(theirs, 0.5)
                self.averages += 1

    def _ask(self) -> None:
        if self._asked is not None:
            if self._peers.is_there(self._asked.peer):
                return
            self._asked = None
        if not self._pending:
            return
        peers = self._choose(sorted(self._peers.living()))
        if not peers:
            self._pending = 0
            return
        peer = self._random.choice(list(peers))
        with self._lock:
            self._pending -= 1
            sent = [published.clone() for published in self._published] if self._mutual else []
        self.questions += 1
        number = (self._synchronized << COUNT_BITS) + self.questions
        if self._mailbox.send(peer, Tag.GOSSIP_ASK, number, sent):
            self._asked = _Question(peer, number, sent)

    def _receive_answer(self) -> None:
        if self._asked is None:
            return
        peer, number, sent = self._asked.peer, self._asked.number, self._asked.sent
        # Late answers to earlier questions are dropped.
        message = self._answers.find(peer, number)
        if message is None:
            return
        if message.content.tensors:
            with self._lock:
                # The published weights may have changed since: the other took half of what was sent.
                for i, theirs in enumerate(message.content.tensors):
                    assert theirs is not None
                    published = self._published[i]
                    published.add_(theirs - (sent[i] if self._mutual else published), alpha=0.5)
                self.averages += 1
        self._asked = None
        message.release()


@dataclass(frozen=True)
class _Question:
    """The peer that was asked, the number of the question, and the weights that were sent with it."""

    peer: int
    number: int
    sent: list[Tensor]
