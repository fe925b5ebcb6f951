"""When each operation of a pipeline started and ended, and each message between its workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plait.core.events import Event
from plait.core.run_events import Messages, Operations
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update

Communicating = Forward | Backward | BackwardInput


@dataclass(frozen=True)
class OpTiming:
    """Start and end of one operation, in seconds since the epoch by the first worker's clock."""

    op: Op
    start: float
    end: float


@dataclass(slots=True)
class MessageTiming:
    """A message that an operation sent to the stage of a peer, or received from it; times as of operations.

    `end` is None until it has arrived or left this worker, which a thread of the link may notice.
    """

    op: Communicating
    is_sent: bool
    peer: int
    peer_stage: int
    start: float
    offset: float
    size: int = 0
    end: float | None = None

    def finish(self) -> None:
        """The message has arrived or left now."""
        self.end = time.time() + self.offset


@dataclass
class Timings:
    """What one worker did and has not recorded yet."""

    ops: list[OpTiming] = field(default_factory=list)
    messages: list[MessageTiming] = field(default_factory=list)

    def clear(self) -> None:
        self.ops.clear()
        self.messages.clear()

    def take(self, step: int, workers: Sequence[int]) -> Iterator[Event]:
        """The events that record it, up to `step`; `workers` are the numbers of the workers by rank.

        A message that is still being sent is left for the next call.
        """
        ended: tuple[list[MessageTiming], list[MessageTiming]] = ([], [])
        for message in self.messages:
            ended[message.end is not None].append(message)
        ops, self.ops, self.messages = self.ops, [], ended[False]
        yield operations_event(step, ops)
        if ended[True]:
            yield _messages_event(step, ended[True], workers)


_LETTERS: dict[type[Op], str] = {
    Forward: "F",
    Backward: "B",
    BackwardInput: "I",
    BackwardWeight: "W",
    Update: "U",
}


def operations_event(step: int, timings: Sequence[OpTiming]) -> Operations:
    """The event that records a worker's operations up to `step`."""
    ops = [timing.op for timing in timings]
    return Operations(
        step,
        "".join(_LETTERS[type(op)] for op in ops),
        tuple(op.stage for op in ops),
        tuple(op.version if isinstance(op, Update) else op.microbatch for op in ops),
        tuple(round(timing.start, 6) for timing in timings),
        tuple(round(timing.end, 6) for timing in timings),
    )


def _messages_event(step: int, messages: Sequence[MessageTiming], workers: Sequence[int]) -> Messages:
    return Messages(
        step,
        "".join(_LETTERS[type(each.op)] for each in messages),
        "".join("s" if each.is_sent else "r" for each in messages),
        tuple(each.op.stage for each in messages),
        tuple(each.op.microbatch for each in messages),
        tuple(workers[each.peer] for each in messages),
        tuple(each.peer_stage for each in messages),
        tuple(each.size for each in messages),
        tuple(round(each.start, 6) for each in messages),
        tuple(round(each.end or 0.0, 6) for each in messages),
    )
