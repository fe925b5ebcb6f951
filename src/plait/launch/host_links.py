"""Whether the hosts of a job reach each other: each renews a word in the store, the first one looks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from plait.comm.handshake import Address
from plait.comm.store import StoreClient
from plait.core.errors import PeerError

LOOK_S = 1.0


def watch_hosts(order: Mapping[str, Any], store: str, secret: bytes, on_lost: Callable[[int], None]) -> None:
    """From now on call `on_lost` with a host's index once it has not been reachable for `link_timeout_s`.

    The first host watches the others, and each of the others its link to the first: either side may be the
    one that can still reach the supervisor. A host that is out of reach is reported once.
    """
    if order["hosts"] == 1:
        return
    timeout_s = order["link_timeout_s"]
    client = StoreClient(Address(store), secret, order["first_rank"], LOOK_S, answer_s=timeout_s / 2)
    if order["index"] == 0:
        arguments = (client, range(1, order["hosts"]), timeout_s, on_lost)
        threading.Thread(target=_watch_others, args=arguments, daemon=True).start()
    else:
        threading.Thread(
            target=_watch_first, args=(client, order["index"], timeout_s, on_lost), daemon=True
        ).start()


def _watch_others(
    client: StoreClient, others: range, timeout_s: float, on_lost: Callable[[int], None]
) -> None:
    last_beats = {index: (b"", time.monotonic()) for index in others}
    while last_beats:
        time.sleep(LOOK_S)
        for index, (word, since) in list(last_beats.items()):
            key = _key(index)
            latest = client.get(key) if client.check([key]) else b""
            if latest != word or not latest:  # before its first word a host may still be starting
                last_beats[index] = (latest, time.monotonic())
            elif time.monotonic() - since > timeout_s:
                on_lost(index)
                del last_beats[index]


def _watch_first(client: StoreClient, index: int, timeout_s: float, on_lost: Callable[[int], None]) -> None:
    reached = time.monotonic()
    number = 0
    while time.monotonic() - reached < timeout_s:
        number += 1
        with contextlib.suppress(PeerError):
            client.set(_key(index), str(number))
            reached = time.monotonic()
        time.sleep(LOOK_S)
    on_lost(index)


def _key(index: int) -> str:
    return f"plait/alive/{index}"
