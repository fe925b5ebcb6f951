"""A run of 20 steps in two stages with known times, as its events, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from plait.cli import app
from plait.core import run_events
from plait.core.codec import encode
from plait.core.events import Event

T0, STEPS = 1.7e9, 20
STATUS: dict[str, Any] = {
    "state": "finished",
    "pid": 4,
    "started": T0,
    "updated": T0,
    "workers": [],
    "progress": {"step": 20, "steps": 20},
}
# Letter, microbatch, start and end within a step of 10 s; a message takes 0.1 s.
FIRST = [("F", 0, 0.0, 1.0), ("F", 1, 1.0, 2.0), ("B", 0, 4.2, 5.2), ("B", 1, 7.2, 8.2), ("U", 0, 8.2, 8.7)]
SECOND = [("F", 0, 1.1, 2.1), ("B", 0, 2.1, 4.1), ("F", 1, 4.1, 5.1), ("B", 1, 5.1, 7.1), ("U", 0, 7.1, 7.6)]
# The same of messages, with the bytes and whether they are sent; those received count from being asked for.
FIRST_MESSAGES = [
    ("F", "s", 0, 4096, 1.0, 1.1),
    ("F", "s", 1, 4096, 2.0, 2.1),
    ("B", "r", 0, 1024, 2.0, 4.2),
    ("B", "r", 1, 1024, 5.2, 7.2),
]
SECOND_MESSAGES = [
    ("F", "r", 0, 4096, 0.0, 1.1),
    ("B", "s", 0, 1024, 4.1, 4.2),
    ("F", "r", 1, 4096, 4.1, 4.1),
    ("B", "s", 1, 1024, 7.1, 7.2),
]


def plait(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def record(folder: Path, rank: int, events: Iterable[tuple[float, Event]]) -> None:
    lines = [json.dumps({"t": t, "rank": rank, "kind": event.kind(), **encode(event)}) for t, event in events]
    path = folder / "events" / f"rank{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def operations(stage: int, step: int) -> tuple[float, Event]:
    letters, microbatches, starts, ends = zip(*(FIRST, SECOND)[stage])
    begin = T0 + 10 * step
    times = [tuple(begin + each for each in column) for column in (starts, ends)]
    event = run_events.Operations(step + 1, "".join(letters), (stage,) * 5, microbatches, *times)
    return begin + 9, event


def messages(stage: int, step: int) -> tuple[float, Event]:
    letters, ways, microbatches, sizes, starts, ends = zip(*(FIRST_MESSAGES, SECOND_MESSAGES)[stage])
    begin, own, other = T0 + 10 * step, (stage,) * 4, (1 - stage,) * 4
    times = [tuple(begin + each for each in column) for column in (starts, ends)]
    words = ["".join(letters), "".join(ways)]
    return begin + 9, run_events.Messages(step + 1, *words, own, microbatches, other, other, sizes, *times)


def step(number: int) -> tuple[float, Event]:
    event = run_events.Step(number + 1, 0, 2.0 / (number + 1), 0.1, 64, 10.0)
    return T0 + 10 * number + 9, event


def make_run(folder: Path) -> Path:
    """The folder of a run of 20 steps in two stages, with an evaluation, a change and a lost worker."""
    start = run_events.RunStarted("two", "m:f", 100, 2, "cpu", "float32", 640, 64, STEPS, 0, 0, "2.13")
    why = "a link is slow <script>alert(1)</script>"
    first = [
        (T0 - 1, start),
        *(step(number) for number in range(STEPS)),
        *(each(0, number) for number in range(STEPS) for each in (operations, messages)),
        (T0 + 99.2, run_events.Evaluated(10, {"loss": 0.5, "accuracy": 0.75}, 10, 0.5)),
        (T0 + 100, run_events.Changed(10, "TopologyChange", {"topology": "ring"}, "topology", why)),
        (
            T0 + 150,
            run_events.WorkersChanged(15, 2, (0, 1), (), (), (2,), 1.5, "supervisor", "it was killed"),
        ),
        (T0 + 200, run_events.RunEnded(STEPS, "finished", 200.0, 6.4, 5_000_000)),
    ]
    record(folder, 0, first)
    record(folder, 1, [each(1, number) for number in range(STEPS) for each in (operations, messages)])
    (folder / "status.json").write_text(json.dumps(STATUS))
    return folder
