"""Limits of the values of keys: part of the type annotation, checked when a job file is read."""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from plait.core.errors import JobError
from plait.schema.hosts import MAX_SLOTS, Host

# Integers up to here are exact in a float64 too, which is how some steps and samples are counted.
MAX_COUNT = 1 << 53
# Eleven and a half days: polling for messages counts milliseconds in 32 bits.
MAX_SECONDS = 1e6
# Upper bound of the microbatches that a stage keeps in flight.
MAX_DEPTH = 1 << 16


@dataclass(frozen=True)
class KeyLimits:
    """Bounds of a number, or of the length and the pattern of a string."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None

    def first_broken(self, number: float) -> str | None:
        """The first bound that `number` is outside of, in words; None if it is within all of them."""
        bounds = (
            ("greater than or equal to", self.ge, operator.ge),
            ("greater than", self.gt, operator.gt),
            ("less than or equal to", self.le, operator.le),
            ("less than", self.lt, operator.lt),
        )
        for text, bound, holds in bounds:
            if bound is not None and not holds(number, bound):
                return f"{text} {bound}"
        return None


@dataclass(frozen=True)
class OneOf:
    """The string is one of `names`."""

    names: tuple[str, ...]


class MapContent(enum.Enum):
    """What a mapping contains."""

    EXTRA_KEYS = "keys of the section that have no field"
    AS_GIVEN = "no key: what the job was made from"
    VARIABLES = "environment variables"


Count = Annotated[int, KeyLimits(ge=1, le=MAX_COUNT)]
CountFromZero = Annotated[int, KeyLimits(ge=0, le=MAX_COUNT)]
Workers = Annotated[int, KeyLimits(ge=1, le=MAX_SLOTS)]
Seconds = Annotated[float, KeyLimits(gt=0, le=MAX_SECONDS)]
StageNumber = Annotated[int, KeyLimits(ge=0, le=MAX_SLOTS)]
InFlight = Annotated[int, KeyLimits(ge=1, le=MAX_DEPTH)]
NonEmpty = Annotated[str, KeyLimits(min_length=1)]
ExtraKeys = Annotated[Mapping[str, Any], MapContent.EXTRA_KEYS]
AsGiven = Annotated[Mapping[str, Any], MapContent.AS_GIVEN]
ReadFrom = Annotated[str | None, MapContent.AS_GIVEN]
TakenHosts = Annotated[tuple[Host, ...], MapContent.AS_GIVEN]
Variables = Annotated[Mapping[str, str], MapContent.VARIABLES]


def check_limits(settings: Any, key: str) -> None:
    """Raise JobError for the first number of a dataclass that is outside of the limits in its type."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        for limits in getattr(hint, "__metadata__", ()):
            if (expected := limits.first_broken(value)) is not None:
                raise JobError(f"{key}.{name}: found {value!r}, expected {expected}")
