"""Errors of tracing: the line of the model's source, and what to change there."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import sympy  # type: ignore[import-untyped]
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from plait.core.errors import InputError

# Folders whose frames are not the user's: torch, sympy, and the tracer itself.
_FOREIGN = tuple(str(Path(module).parent) for module in (torch.__file__, sympy.__file__, __file__))

USE_TENSORS = (
    "keep the decision in tensors (torch.where, a mask that multiplies), or take it before the model is "
    "called, from plain Python values"
)
FIXED_SHAPES = (
    "give every tensor a shape that follows from the shapes of the inputs: torch.where or a product with "
    "the mask in place of selecting by it"
)


class TraceError(InputError):
    """A model whose operations cannot be recorded; the message names the line of its source."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's own code."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: `{self.text}`"


def current_line() -> SourceLine | None:
    """The innermost line of the user's code that is running now."""
    return _innermost((frame, number) for frame, number in reversed(list(traceback.walk_stack(None))))


def failing_line(failure: BaseException) -> SourceLine | None:
    """The innermost line of the user's code that `failure` passed through."""
    return _innermost(traceback.walk_tb(failure.__traceback__))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> SourceLine | None:
    line = None
    for frame, number in frames:
        file = frame.f_code.co_filename
        if not file.startswith((*_FOREIGN, "<")):
            line = SourceLine(file, number, linecache.getline(file, number).strip())
    return line


def refusal(what: str, change: str, line: SourceLine | None) -> TraceError:
    """The error for a construct that cannot be traced; `line` is where it is."""
    location = f"{line}: " if line else ""
    return TraceError(f"{location}{what}; to train this model in stages, {change}")


def explain(failure: Exception) -> TraceError:
    """The message about an exception in the model's forward during tracing."""
    if isinstance(failure, TraceError):
        return failure
    line = failing_line(failure)
    if isinstance(failure, DataDependentOutputException):
        return refusal(
            "this reads the value of a tensor (an if, item(), int() or float() of it)", USE_TENSORS, line
        )
    if isinstance(failure, (GuardOnDataDependentSymNode, DynamicOutputShapeException)):
        return refusal("this makes a shape depend on the values of a tensor", FIXED_SHAPES, line)
    if isinstance(failure, UnsupportedOperatorException):
        what = f"torch does not know the shapes that {failure.func} returns"
        return refusal(what, "register a fake implementation for it (torch.library.register_fake)", line)
    summary = str(failure).strip().partition("\n")[0]
    what = f"the model's forward failed with {type(failure).__name__}: {summary}"
    change = (
        "check that the inputs fit the model, and that forward uses only torch operations (numpy, "
        "tolist() and C extensions see no values while a model is traced)"
    )
    return refusal(what, change, line)
