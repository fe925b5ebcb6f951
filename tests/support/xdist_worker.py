"""Workers of pytest-xdist are forked from the server of the test run: none of them imports torch again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import execnet

from support import server

_STAND_IN = Path(__file__).parent / "forked" / "xdist_worker.py"


def forked(spec: execnet.XSpec) -> execnet.XSpec:
    """The worker that `spec` describes, forked if it would be a process of this Python on this machine."""
    if not spec.popen or spec.python:
        return spec
    python = shlex.join([sys.executable, str(_STAND_IN), server.address()])
    return execnet.XSpec(f"{spec}//id={spec.id}//python={python}")


def main() -> None:
    """What execnet has a new Python do: run the line that comes first."""
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
