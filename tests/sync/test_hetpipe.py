"""HetPipe's parameter server: nobody is too far ahead, and a segment ends with the same weights for all."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch

from plait.comm.links.packing import Content, Message
from plait.comm.tags import Tag
from plait.core.errors import PeerError
from plait.schema.sync_options import HetPipeOptions, options_among
from plait.sync.averaging.parameter_server import ServedWeights, Server, held_up_by


@pytest.mark.parametrize(
    ("workers", "servers", "dedicated"), [(5, 3, True), (3, 2, True), (2, 1, True), (1, 1, False)]
)
def test_there_are_as_many_servers_as_workers_that_are_left_allow(
    workers: int, servers: int, dedicated: bool
):
    given = {"servers": 3, "dedicated": True, "wave": 4}
    assert options_among("hetpipe", given, workers) == HetPipeOptions(servers, dedicated, wave=4)


class ScriptedMail:
    """Mail of the server of worker 0: what the test puts in, and what the server sent."""

    rank = 0

    def __init__(self) -> None:
        self.pushed: list[tuple[int, Message]] = []
        self.sent: dict[int, list[float]] = {}
        self.answered_all = threading.Event()
        self.gone: set[int] = set()

    def push(self, peer: int, number: int, change: float, last: bool) -> None:
        content = Content(number, (torch.full((2,), change),), "last" if last else "")
        self.pushed.append((peer, Message(content, lambda: None)))

    def peers(self) -> list[int]:
        return [1, 2]

    def is_gone(self, peer: int) -> bool:
        return peer in self.gone

    def wait(self, seconds: float) -> None:
        time.sleep(0.001)

    def take(self, peer: int, channel: int) -> Message | None:
        for i, (sender, message) in enumerate(self.pushed):
            if sender == peer:
                del self.pushed[i]
                return message
        return None

    def send(self, peer: int, channel: int, number: int, tensors: Any) -> bool:
        assert channel == Tag.PULL
        self.sent[peer] = tensors[0].tolist()
        if len(self.sent) == len(self.peers()):
            self.answered_all.set()
        return True

    def flush(self, seconds: float) -> None:
        pass


def test_who_is_more_waves_ahead_than_allowed_waits_for_those_behind():
    assert held_up_by({0: 3, 1: 1, 2: 0}, {2}, 0, 1) == [1]
    assert held_up_by({0: 3, 1: 2, 2: 0}, {2}, 0, 1) == []
    assert held_up_by({0: 3, 1: 2, 2: 0}, set(), 0, 2) == [2]
    assert held_up_by({0: 0, 1: 2, 2: 0}, set(), 0, 0) == []


def test_all_end_a_segment_with_the_same_weights_though_one_has_begun_the_next():
    weights = ServedWeights([torch.zeros(2)], workers=3, staleness=0)
    for worker in range(3):
        weights.push(worker, [torch.full((2,), 3.0)], last=True)
    for worker in (1, 2):
        (found,) = weights.pull(worker) or ()
        assert found.tolist() == [3.0, 3.0]
    # The worst order: worker 1 is in the next segment before worker 0 has pulled.
    weights.push(1, [torch.full((2,), 30.0)], last=False)
    (found,) = weights.pull(0) or ()
    assert found.tolist() == [3.0, 3.0]
    # That push counts in the new segment: worker 1 waits for the others there.
    assert weights.awaited(1) == [0, 2]


def test_who_pulls_late_gets_no_change_of_the_next_wave():
    weights = ServedWeights([torch.zeros(2)], workers=2, staleness=0)
    for worker in range(2):
        weights.push(worker, [torch.full((2,), 2.0)], last=False)
    assert [flat.tolist() for flat in weights.pull(1) or ()] == [[2.0, 2.0]]
    # Worker 1 is a wave further before worker 0 has pulled.
    weights.push(1, [torch.full((2,), 20.0)], last=False)
    assert [flat.tolist() for flat in weights.pull(0) or ()] == [[2.0, 2.0]]
    assert weights.pull(1) is None


def test_a_server_waits_for_no_worker_that_is_gone():
    mailbox: Any = ScriptedMail()
    mailbox.gone.add(2)
    server = Server(mailbox, ServedWeights([torch.zeros(2)], workers=3, staleness=0))
    mailbox.push(1, 0, 3.0, last=True)
    server.push([torch.full((2,), 3.0)], last=True)
    with pytest.raises(PeerError, match="worker 2, whose pushes are waited for, is gone"):
        server.pull(deadline_s=60.0)
    server.close()


def test_a_server_answers_all_workers_once_all_have_pushed():
    mailbox: Any = ScriptedMail()
    server = Server(mailbox, ServedWeights([torch.zeros(2)], workers=3, staleness=0))
    for peer in (1, 2):
        mailbox.push(peer, 0, 3.0, last=True)
    server.push([torch.full((2,), 3.0)], last=True)
    (found,) = server.pull(deadline_s=20.0)
    assert found.tolist() == [3.0, 3.0]
    assert mailbox.answered_all.wait(20.0)
    assert mailbox.sent == {1: [3.0, 3.0], 2: [3.0, 3.0]}
    server.close()


class LateMail(ScriptedMail):
    """The workers push for the first time after a while."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self._due = time.monotonic() + late_s

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        if time.monotonic() > self._due:
            self._due = math.inf
            for peer in (1, 2):
                self.push(peer, 0, 3.0, last=True)


def test_a_server_that_does_not_train_waits_for_those_that_do_however_long_they_take():
    mailbox: Any = LateMail(0.3)
    server = Server(mailbox, ServedWeights([torch.zeros(2)], workers=3, staleness=0, idle=(0,)))
    server.push([torch.zeros(2)], last=True)
    (found,) = server.pull(deadline_s=0.1)
    assert found.tolist() == [3.0, 3.0]
    server.close()


def test_a_wait_for_a_worker_that_does_not_push_names_it():
    mailbox: Any = ScriptedMail()
    server = Server(mailbox, ServedWeights([torch.zeros(2)], workers=3, staleness=0))
    mailbox.push(1, 0, 1.0, last=False)
    server.push([torch.zeros(2)], last=False)
    with pytest.raises(PeerError, match=r"worker 0 waited 0.2 s for workers \[2\] to push"):
        server.pull(deadline_s=0.2)
    server.close()
