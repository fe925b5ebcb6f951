"""Pieces of HTML that all pages have: the page around its parts, and tables."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

# The first bytes of a page, by which it is known as a report.
MARK = "<!doctype html>\n<!-- plait report -->\n"


def document(title: str, sections: Mapping[str, str], style: str = "", script: str = "") -> str:
    """One HTML file that loads nothing: the sections, with the pages' style and scripts and more of both."""
    folder = resources.files("plait.report.outputs")
    css, *code = (
        folder.joinpath(name).read_text() for name in ("page.css", "charts.js", "timeline.js", "page.js")
    )
    parts = "".join(f'<section id="part-{name}">{text}</section>' for name, text in sections.items())
    return (
        f'{MARK}<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{css}{style}'
        f"</style></head>\n<body>{parts}<script>{''.join(code)}{script}</script></body></html>\n"
    )


def head_of(name: str, state: str, cause: str | None, *notes: str) -> str:
    """The title, the state and why it failed, and `notes` about it."""
    why = f'<p class="bad">It ended with: {html.escape(cause)}</p>' if cause else ""
    lines = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes if note)
    return f"<h1>{html.escape(name)} {state_mark(state)}</h1>{why}{lines}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = ()) -> str:
    """A table that scrolls sideways on a narrow screen; columns of `words` are aligned left and may wrap."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        marks = [' class="words"' if number in words else "" for number in range(len(texts))]
        return "".join(f"<{tag}{mark}>{html.escape(text)}</{tag}>" for mark, text in zip(marks, texts))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'


def state_mark(state: str) -> str:
    """The state of a run as a coloured word."""
    bad = " bad" if state in ("failed", "died", "diverged") else ""
    return f'<span class="state{bad}">{html.escape(state)}</span>'


def or_dash(value: Any, show: Callable[[Any], str]) -> str:
    """`value` as `show` writes it, and a dash for None and NaN."""
    return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else show(value)
