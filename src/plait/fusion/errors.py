"""Errors of fusion, and the line of the user's code that an error is about."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

import torch

from plait.core.errors import InputError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_VERIFICATION = str(Path(__file__).parents[1] / "verification")


class FusionError(InputError):
    """The models, or something they do, cannot be fused as they are.

    `what` says what was found; the `advice`, if any, is appended to the message.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what


def user_line() -> str:
    """`file:line: source` of the innermost frame outside torch, this package and the verification."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE, _VERIFICATION, "<")):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"
