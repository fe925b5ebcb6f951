"""Who is named when a job fails: from the workers' reports and ends, whatever their messages say."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.core.errors import DataError, LostPeer, PeerError
from plait.launcher.failure_cause import RankState, find_cause, is_conclusive
from plait.launcher.workers.worker_failure import describe_failure


def states(**signs: Any) -> list[RankState]:
    """Four workers; `r1=...` gives the signs of worker 1, in the order of the arguments."""
    made = [RankState(rank, "here") for rank in range(4)]
    for index, (name, sign) in enumerate(signs.items()):
        state = made[int(name[1])]
        if sign == "done":
            state.done = True
            continue
        state.trouble_index = index
        if isinstance(sign, int):
            state.status = sign
        elif isinstance(sign, float):
            state.silent_s = sign
        else:
            state.failure = describe_failure(state.rank, "here", sign)
            state.status = 1
    return made


def silent(peer: int | None, words: str = "xyz") -> PeerError:
    return PeerError(words, LostPeer.SILENT, peer)


def gone(peer: int | None, words: str = "xyz") -> PeerError:
    return PeerError(words, LostPeer.GONE, peer)


KILLED = -int(signal.SIGKILL)
ABORTED = -int(signal.SIGABRT)


# What is known of the workers, which of them is named, and with which words.
CASES: list[tuple[dict[str, Any], int, str]] = [
    ({"r2": ZeroDivisionError("a fault")}, 2, "ZeroDivisionError: a fault"),
    ({"r0": gone(1), "r1": KILLED}, 1, "ended by SIGKILL"),
    ({"r0": gone(1), "r1": ValueError("mine"), "r2": gone(0)}, 1, "ValueError: mine"),
    # A chain of waits ends at the one that says nothing.
    ({"r0": silent(1), "r1": silent(2), "r2": silent(3)}, 3, "hangs: worker 2 reports: xyz"),
    # Those who lost one that had given up accuse it; it had accused the one that hangs.
    ({"r0": silent(3), "r1": gone(0), "r2": gone(0)}, 3, "hangs: worker 0 reports: xyz"),
    # Torch's own errors name nobody: the worker that does not report hangs.
    ({"r0": silent(None), "r1": silent(None), "r3": silent(None)}, 2, "hangs: worker 0 reports: xyz"),
    ({"r1": 12.0}, 1, "hangs: its process has shown no sign of life for 12 s"),
    ({"r0": silent(1), "r1": 12.0}, 1, "hangs: its process has shown no sign of life for 12 s"),
    # Torch's watchdog aborts the survivors of a worker that hangs.
    ({"r0": ABORTED, "r1": ABORTED, "r2": silent(None)}, 3, "hangs: worker 2 reports: xyz"),
    ({"r0": ABORTED, "r1": "done", "r2": "done", "r3": "done"}, 0, "ended by SIGABRT"),
    ({"r0": ABORTED, "r1": KILLED}, 1, "ended by SIGKILL"),
    # All report, and all only that someone is missed: the first is the best there is.
    ({"r3": gone(1), "r0": gone(3), "r1": gone(0), "r2": gone(3)}, 3, "xyz"),
    ({"r1": DataError("img_7.png: cannot be decoded")}, 1, "img_7.png: cannot be decoded"),
    ({"r2": 0}, 2, "ended with status 0"),
]


@pytest.mark.parametrize(("signs", "named", "words"), CASES)
def test_the_worker_that_is_to_blame_is_named(signs: dict[str, Any], named: int, words: str):
    cause = find_cause(states(**signs))
    assert (cause.rank, cause.summary) == (named, words)


@pytest.mark.parametrize(
    "words", ["", "Connection closed by peer", "Timed out waiting", "x" * 1000, "worker 3 is gone"]
)
@pytest.mark.parametrize(("signs", "named", "_"), CASES)
def test_what_messages_say_changes_nothing(signs: dict[str, Any], named: int, _: str, words: str):
    """Whether the error is raised with other words, or its report has others."""
    reworded = {
        name: type(sign)(words, sign.kind, sign.peer) if isinstance(sign, PeerError) else sign
        for name, sign in signs.items()
    }
    known = states(**reworded)
    assert find_cause(known).rank == named
    for state in known:
        if state.failure is not None:
            state.failure = replace(state.failure, summary=words, traceback=words)
    assert find_cause(known).rank == named
    assert is_conclusive(known) == is_conclusive(states(**signs))


def test_errors_of_torch_about_a_lost_peer_are_distinguished_from_faults():
    for words in ("[gloo] Connection closed by peer [127.0.0.1]:1", "Timed out waiting 5000ms for recv"):
        assert describe_failure(0, "h", RuntimeError(words)).lost is not None
        assert describe_failure(0, "h", RuntimeError(words)).traceback == ""
        assert "another worker" in describe_failure(0, "h", RuntimeError(words)).summary
    assert describe_failure(0, "h", RuntimeError("shape mismatch")).lost is None
    assert "shape mismatch" in describe_failure(0, "h", RuntimeError("shape mismatch")).summary
    assert describe_failure(0, "h", ValueError("Timed out waiting")).lost is None
    assert describe_failure(0, "h", DataError("Connection reset by peer")).lost is None


def test_reports_are_waited_for_only_while_they_may_name_a_better_cause():
    assert not is_conclusive(states(r0=silent(1)))
    assert is_conclusive(states(r0=silent(1), r1=KILLED))
    assert is_conclusive(states(r0=gone(1), r1=ValueError("x")))
    assert is_conclusive(states(r1=3.0))
    assert not is_conclusive(states(r0=ABORTED))
    assert is_conclusive(states(r0=silent(1), r1=silent(0), r2=silent(0), r3=silent(0)))


def test_a_worker_without_memory_says_what_takes_less():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    for failure in (caught.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError()):
        assert "try a smaller data.batch_size" in describe_failure(0, "h", failure).summary
    assert "data.batch_size" not in describe_failure(0, "h", RuntimeError("shape mismatch")).summary
