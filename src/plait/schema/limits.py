"""What the value of a key may be: said beside its type, checked where a job file is read."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from plait.schema.hosts import MOST_SLOTS

# Whole numbers up to here survive every way that steps and samples are counted.
MOST = 1 << 53
# A week and a half; what waits for messages counts milliseconds in 32 bits.
LONGEST_S = 1e6
# Microbatches that a stage keeps in flight: more than fit anywhere.
MOST_DEPTH = 1 << 16


@dataclass(frozen=True)
class KeyLimits:
    """KeyLimits of a number, or of the length and the form of a text."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class OneOf:
    """A text is one of `names`, which are listed where each of them is defined."""

    names: tuple[str, ...]


class MapContent(enum.Enum):
    """What a mapping holds."""

    FURTHER_KEYS = "all keys of the section that have no field of their own"
    AS_GIVEN = "the keys of the job that were set, as plain values"
    VARIABLES = "environment variables"


Count = Annotated[int, KeyLimits(ge=1, le=MOST)]
CountFromZero = Annotated[int, KeyLimits(ge=0, le=MOST)]
Workers = Annotated[int, KeyLimits(ge=1, le=MOST_SLOTS)]
Seconds = Annotated[float, KeyLimits(gt=0, le=LONGEST_S)]
StageNumber = Annotated[int, KeyLimits(ge=0, le=MOST_SLOTS)]
InFlight = Annotated[int, KeyLimits(ge=1, le=MOST_DEPTH)]
NonEmpty = Annotated[str, KeyLimits(min_length=1)]
FurtherKeys = Annotated[Mapping[str, Any], MapContent.FURTHER_KEYS]
AsGiven = Annotated[Mapping[str, Any], MapContent.AS_GIVEN]
Variables = Annotated[Mapping[str, str], MapContent.VARIABLES]
