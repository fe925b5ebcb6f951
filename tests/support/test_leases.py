"""A lease runs out for who is silent, not for those who could not be heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from plait.comm.running_clock import RunningClock
from support.leases import Leases


def test_a_clock_of_silence_stands_still_while_its_owner_is_paused():
    times = iter([0.0, 0.5, 13.5, 14.0])
    clock = RunningClock(1.0, lambda: next(times))
    assert [clock.read() for _ in range(3)] == [0.5, 1.5, 2.0]
    assert clock.now == 2.0


class StallingStore:
    """A store that answers nobody while it is stalled."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.runs = threading.Event()
        self.runs.set()
        self.stalled = threading.Semaphore(0)

    def _answer(self, answer: Callable[[], object]) -> object:
        if not self.runs.is_set():
            self.stalled.release()
        self.runs.wait(20)
        return answer()

    def set(self, key: str, value: str) -> None:
        self._answer(lambda: self._values.update({key: value.encode()}))

    def get(self, key: str) -> object:
        return self._answer(lambda: self._values[key])

    def check(self, keys: list[str]) -> object:
        return self._answer(lambda: all(key in self._values for key in keys))


def await_living(presence: Leases, members: tuple[int, ...]) -> None:
    end = time.monotonic() + 20
    while presence.living() != members:
        assert time.monotonic() < end, presence.living()
        time.sleep(0.01)


def test_nobody_is_absent_because_the_store_was_paused():
    store = StallingStore()
    first, second = (Leases(store, "t", rank, range(2), lease_s=0.3) for rank in range(2))
    store.runs.clear()
    for _ in range(2):
        assert store.stalled.acquire(timeout=20)
    seen = set()
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        seen.add(first.living())
        time.sleep(0.01)
    store.runs.set()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        seen.add(first.living())
    assert seen == {(0, 1)}
    second._ended.set()
    await_living(first, (0,))
    first.close()
