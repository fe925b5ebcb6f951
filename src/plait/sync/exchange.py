"""A thread that averages beside the work: it answers peers at any time and asks some of them itself.

What others see is a copy of the weights, the truth. The worker computes on its own tensors and brings the
change of each update into the truth, where the thread's averages have gone meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from plait.cluster.mail import Mail
from plait.cluster.messages import Message
from plait.cluster.presence import Presence
from plait.sync.vector import Vector

ASK, ANSWER = 7, 8
LOOK_S = 0.02


class Exchange:
    """Weights that peers may ask for, and the thread that serves them.

    `choose` names the peers that may be asked, of those that are living; with `mutual` who answers takes
    the mean as well. `number` tells apart what was asked before all settled and after.
    """

    def __init__(
        self,
        mail: Mail,
        presence: Presence,
        vector: Vector,
        choose: Callable[[Sequence[int]], Sequence[int]],
        *,
        mutual: bool,
        seed: int,
    ) -> None:
        self._mail = mail
        self._presence = presence
        self._vector = vector
        self._choose = choose
        self._mutual = mutual
        self._random = random.Random(f"{seed}/{mail.rank}")
        self._lock = threading.Lock()
        self._truth = [flat.clone() for flat in vector.gather()]
        self._base = [flat.clone() for flat in self._truth]
        self._number = 0
        self._wishes = 0
        self._asked: tuple[int, list[Tensor]] | None = None
        self._averages = 0
        self._run = threading.Event()
        self._parked = threading.Event()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="plait-exchange", daemon=True)
        self._run.set()
        self._thread.start()

    def update(self) -> int:
        """Bring this worker's update into the truth, compute on from there, and wish for an average.

        Returns how many averages there have been.
        """
        if self._failure is not None:
            raise self._failure
        flats = self._vector.gather()
        with self._lock:
            for truth, flat, base in zip(self._truth, flats, self._base):
                truth.add_(flat).sub_(base)
                flat.copy_(truth)
                base.copy_(truth)
            self._wishes = min(self._wishes + 1, 2)
            averages = self._averages
        self._vector.scatter()
        return averages

    def pause(self) -> None:
        """Have the thread stand still; the worker's tensors hold the truth, and the mail is the caller's."""
        self._run.clear()
        self._parked.wait()
        if self._failure is not None:
            raise self._failure
        self.update()
        self._wishes, self._asked = 0, None

    def resume(self) -> None:
        """Go on from what the worker's tensors hold; what was asked before is void."""
        self._number += 1
        for truth, base, flat in zip(self._truth, self._base, self._vector.gather()):
            truth.copy_(flat)
            base.copy_(flat)
        self._parked.clear()
        self._run.set()

    def close(self) -> None:
        """End the thread, which stands still."""
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
                self._mail.wait(LOOK_S / 4 if self._wishes and self._asked is None else LOOK_S)
                for peer in self._mail.peers():
                    self._answer_all(peer)
                self._hear_answer()
                self._ask()
        except BaseException as failure:
            self._failure = failure
            self._parked.set()

    def _answer_all(self, peer: int) -> None:
        while (message := self._mail.take(peer, ASK)) is not None:
            if message.content.number == self._number:
                self._answer(peer, message)
            message.release()
            self._mail.flush(0.1)

    def _answer(self, peer: int, message: Message) -> None:
        with self._lock:
            self._mail.send(peer, ANSWER, self._number, self._truth)
            if self._mutual:
                for truth, theirs in zip(self._truth, message.content.tensors):
                    assert theirs is not None
                    truth.lerp_(theirs, 0.5)
                self._averages += 1

    def _ask(self) -> None:
        if self._asked is not None:
            peer = self._asked[0]
            if not self._mail.is_gone(peer) and peer in self._presence.living():
                return
            self._asked = None
        if not self._wishes:
            return
        living = [p for p in self._presence.living() if p != self._mail.rank and not self._mail.is_gone(p)]
        peers = self._choose([*living, self._mail.rank])
        if not peers:
            self._wishes = 0
            return
        peer = self._random.choice(list(peers))
        with self._lock:
            self._wishes -= 1
            sent = [truth.clone() for truth in self._truth] if self._mutual else []
        if self._mail.send(peer, ASK, self._number, sent):
            self._asked = (peer, sent)
            self._mail.flush(0.1)

    def _hear_answer(self) -> None:
        if self._asked is None:
            return
        peer, sent = self._asked
        message = self._mail.take(peer, ANSWER)
        if message is None:
            return
        if message.content.number == self._number:
            with self._lock:
                # The truth may have moved since it was sent: the other took half of what was sent.
                for i, theirs in enumerate(message.content.tensors):
                    assert theirs is not None
                    truth = self._truth[i]
                    truth.add_(theirs - (sent[i] if self._mutual else truth), alpha=0.5)
                self._averages += 1
            self._asked = None
        message.release()
