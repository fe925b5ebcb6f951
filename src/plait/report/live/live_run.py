"""The page of a run that may be going on: its sections, each with the version at which it last changed.

Reading what was added costs little, making the sections of a long run much: that is done again only after so
long that it takes `MOST_SHARE` of the machine's cores, and at once when the state of the run has changed.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.names import in_words
from plait.core.units import show_seconds
from plait.launcher.run_dir import GOING_ON
from plait.report.outputs.markup import head_of
from plait.report.outputs.page import sections_of
from plait.report.record import RunReader
from plait.report.run_data import make_data
from plait.report.terminal import describe
from plait.schema.plans.plan import Plan

MOST_SHARE = 0.005
# A run that has recorded nothing for longer says so, and a page whose sections are older.
SILENT_S = 10.0


@dataclass(frozen=True)
class RunNow:
    """A run as its status and its lock have it; `next_command` goes on with one that has ended."""

    state: str
    cause: str | None = None
    progress: Mapping[str, Any] | None = None
    workers: int = 0
    can_stop: bool = False
    can_resize: bool = False
    next_command: str = ""


class LiveRun:
    """The sections of the page of the run in `folder`; `now` and `plan` read its other files."""

    def __init__(
        self, name: str, folder: Path, now: Callable[[], RunNow], plan: Callable[[], Plan | None]
    ) -> None:
        self.name = name
        self._now, self._plan = now, plan
        self._reader = RunReader(folder)
        self._sections: dict[str, tuple[int, str]] = {}
        self._version = 0
        self._state = ""
        self._is_stale = True
        self._made_s = self._next_s = 0.0
        # What went wrong, and with which reading of the run: one that replaced it may be whole.
        self._problem = (0, "")

    def since(self, version: int) -> tuple[int, dict[str, str]]:
        """The present version, and the sections that have changed after `version`."""
        present = self._version
        return present, {name: text for name, (at, text) in self._sections.items() if at > version}

    def read(self) -> None:
        """Read the run for the first time, with the errors of a run that cannot be read."""
        self._reader.read_new()

    def refresh(self) -> None:
        """Read what was added to the run, and make the sections again that this may change."""
        began_s = time.thread_time()
        now = self._now()
        try:
            self._is_stale |= self._reader.read_new()
            self._is_stale |= now.state != self._state
            if self._is_stale and (now.state != self._state or time.monotonic() >= self._next_s):
                # What fails is not tried again before there is something new.
                self._state, self._is_stale = now.state, False
                # The line above it has the time left, which changes each second.
                total = {key: value for key, value in (now.progress or {}).items() if key == "steps"}
                data = make_data(
                    self.name, self._reader.recorded(), self._plan(), now.state, now.cause, total
                )
                self._put(sections_of(data))
                self._made_s = time.monotonic()
                cores = os.cpu_count() or 1
                self._next_s = self._made_s + (time.thread_time() - began_s) / (MOST_SHARE * cores)
        except Exception as failure:  # damaged events may fail anywhere; the page goes on with what it has
            self._problem = self._reader.begun, f"not all of it can be shown: {in_words(failure)}"
        self._put({"head": self._head(now), "controls": controls_of(self.name, now)})

    def _head(self, now: RunNow) -> str:
        is_going_on = now.state in GOING_ON
        silent_s = time.time() - self._reader.last_t
        notes = [describe(now.progress or {}, is_going_on).replace("  ", " · ")]
        if not self._reader.last_t:
            notes.append("No events yet; a script that plait run starts records none.")
        elif is_going_on and silent_s > SILENT_S:
            notes.append(f"Nothing was recorded for {show_seconds(round(silent_s))}.")
        made_s = time.monotonic() - self._made_s
        if self._is_stale and made_s > SILENT_S:
            notes.append(f"The curves and what is below them are of {show_seconds(round(made_s))} ago.")
        if not is_going_on and now.next_command:
            notes.append(f"next: {now.next_command}")
        begun, problem = self._problem
        if begun == self._reader.begun:
            notes.append(problem)
        return head_of(self.name, now.state, now.cause, *notes)

    def _put(self, sections: Mapping[str, str]) -> None:
        version = self._version + 1
        changed = {
            name: (version, text)
            for name, text in sections.items()
            if name not in self._sections or self._sections[name][1] != text
        }
        if changed:
            self._sections |= changed
            self._version = version


def controls_of(name: str, now: RunNow) -> str:
    """The buttons for what the run can do now; each asks before it acts."""
    parts = []
    if now.can_stop and now.state == "stopping":
        text = f"End {name} at once? It does not finish its step and writes no checkpoint."
        parts.append(_button("stop", "End at once", text))
    elif now.can_stop:
        text = f"Stop {name}? It finishes its step and writes a checkpoint."
        parts.append(_button("stop", "Stop", text))
    if now.can_resize:
        parts.append(
            f'<label>workers <input name="workers" type="number" min="1" value="{now.workers}"></label> '
            + _button("resize", "Resize", f"Go on with % workers in {name}?")
        )
    return f"<p>{' '.join(parts)}</p>" if parts else ""


def _button(action: str, label: str, question: str) -> str:
    return f'<button data-action="{action}" data-question="{html.escape(question)}">{label}…</button>'
