"""What becomes of the nodes of a Ray cluster while a job runs on some of them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

# How often nodes are looked at.
LOOK_S = 1.0

Nodes = Callable[[], Sequence[Mapping[str, Any]]]


class NodeWatch:
    """Which nodes are gone, new, or taken away; looked up in a thread, since Ray may take its time.

    `nodes` are all that Ray knows, and `usable` those that can have a host.
    """

    def __init__(self, nodes: Nodes = tuple, usable: Nodes = tuple) -> None:
        self._nodes, self._usable = nodes, usable
        self._known = {node["NodeID"] for node in nodes()}
        self._gone: frozenset[str] = frozenset()
        self._new: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        # By node, when it is taken away.
        self._deadlines: Mapping[str, float] = {}
        self._ended = threading.Event()
        if self._known:
            threading.Thread(target=self._look, daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def is_gone(self, node: str) -> bool:
        return node in self._gone

    def take_new(self) -> list[Mapping[str, Any]]:
        """The nodes that came since the last call."""
        return [self._new.get() for _ in range(self._new.qsize())]

    def seconds_left(self, nodes: Collection[str]) -> float | None:
        """Until the first of `nodes` is taken away; None if that is not known of any."""
        deadlines = [at for node, at in self._deadlines.items() if node in nodes]
        return max(0.0, min(deadlines) - time.time()) if deadlines else None

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(Exception):  # the head may be gone: the agents' own links tell
                self._gone = frozenset(node["NodeID"] for node in self._nodes() if not node["Alive"])
                self._deadlines = draining_nodes()
                for node in self._usable():
                    if node["NodeID"] not in self._known:
                        self._known.add(node["NodeID"])
                        self._new.put(node)


def draining_nodes() -> dict[str, float]:
    """The nodes that Ray drains, and when each is taken away; without a deadline, at once."""
    from ray._private.state import state

    deadlines_ms: Mapping[str, float] = getattr(state, "get_draining_nodes", dict)()
    return {node: at_ms / 1000 for node, at_ms in deadlines_ms.items()}
