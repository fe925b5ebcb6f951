"""Values in messages: a short `repr`, shortened texts and lists."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

# Longer messages are cut.
LONGEST_MESSAGE = 2000


class _Short(reprlib.Repr):
    """`repr` of the first few items of the first few levels, so that it is fast for every value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 6
        self.maxstring = self.maxother = self.maxlong = 70

    def repr_int(self, value: int, level: int) -> str:
        if abs(value) >= 10**70:
            return f"a whole number of {int(value.bit_length() * math.log10(2)) + 1} digits"
        return repr(value)


_short = _Short()


def shown(value: Any) -> str:
    """`repr(value)` on one line, cut to about 80 characters."""
    return shortened(" ".join(_short.repr(value).split("\n")))


def shortened(text: str, most: int = 80) -> str:
    """`text`, with its middle replaced by `...` if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 3]}...{text[-tail:]}"


def printable(text: str) -> str:
    """`text` with control characters escaped: a terminal would execute those of an untrusted file."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def listed(names: Iterable[object], most: int = 300) -> str:
    """`a, b, c`, cut after about `most` characters to `a, b and 3 more`."""
    texts = [shortened(str(name)) for name in names]
    count = 0
    length = 0
    for text in texts:
        length += len(text) + 2
        if length > most and count:
            break
        count += 1
    rest = len(texts) - count
    return ", ".join(texts[:count]) + (f" and {rest:,} more" if rest else "")


def one_message(mistakes: Iterable[str], count: int) -> str:
    """The mistakes, `count` of them, one per line; those that do not fit are only counted, not evaluated."""
    lines: list[str] = []
    length = 0
    for mistake in mistakes:
        line = shortened(mistake, LONGEST_MESSAGE)
        length += len(line) + 1
        if lines and length > LONGEST_MESSAGE - 40:
            lines.append(f"and {count - len(lines):,} more mistakes")
            break
        lines.append(line)
    return "\n".join(lines)


def show_numbers(numbers: Sequence[int]) -> str:
    """Numbers as ranges, such as `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
