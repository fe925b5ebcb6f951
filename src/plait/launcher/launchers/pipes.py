"""A process with pipes. Ray's nodes are sent it by value, so it uses nothing but the standard library."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def open_pipes(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `command` with these variables and no others; OSError if it cannot be run."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        bufsize=1,
        env=environment,
        # The terminal's Ctrl-C is for the supervisor alone.
        start_new_session=True,
    )
