"""Charts as inline SVG: curves over steps, and the values of trials on parallel axes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from plait.report.curves import Points, decimated, points_of
from plait.report.trials import TrialRow
from plait.schema.results import show_value

WIDTH, HEIGHT = 340, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 20, 10, 24
# Curves of fewer points show each of them.
MOST_DOTS = 12
# Classes c0 to c7 of the page's style are colours; further curves are grey.
COLOURS = 8
MOST_POINTS = 40_000


def chart(title: str, curves: Mapping[str, Points], with_legend: bool = True, top: float = math.inf) -> str:
    """A figure of curves by step; losses that span two powers of ten have a logarithmic axis.

    Values above `top` are drawn there.
    """
    curves = {name: [(step, min(value, top)) for step, value in points] for name, points in curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    values = [value for points in curves.values() for _, value in points]
    steps = [step for points in curves.values() for step, _ in points]
    is_log = "loss" in title and min(values) > 0 and max(values) > 100 * min(values)
    x = _Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT, False)
    y = _Axis(min(values), max(values), HEIGHT - BOTTOM, TOP, is_log)
    most = max(20, min(1200, MOST_POINTS // len(curves)))
    # The first curves are drawn last, above the others.
    lines = [
        _curve(name, number, decimated(points, most), x, y)
        for number, (name, points) in reversed(list(enumerate(curves.items())))
    ]
    grid = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        for tick in y.ticks()
    ]
    below = [
        f'<text x="{x(tick):.1f}" y="{HEIGHT - 8}" '
        f'text-anchor="{"end" if x(tick) + 3 * len(text) > WIDTH else "middle"}">{text}</text>'
        for tick in x.ticks()
        for text in [_number(tick)]
    ]
    last = f"<span>{_last(values[-1])}</span>" if len(curves) == 1 else ""
    # What charts.js turns a place in the picture into a step and a value by.
    scale = " ".join(map(str, (*x.scale, *y.scale, int(is_log))))
    return (
        f"<figure><figcaption>{html.escape(title)}{last}</figcaption>"
        f'<svg class="chart" data-scale="{scale}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)} by step">{"".join(grid)}{"".join(below)}'
        f'<text x="4" y="{HEIGHT - 8}">step</text>{"".join(lines)}</svg>'
        f"{legend(list(curves)) if with_legend else ''}</figure>"
    )


def legend(names: Sequence[str]) -> str:
    """The colours of several curves."""
    if len(names) < 2:
        return ""
    keys = "".join(f'<span class="c{i}">{html.escape(name)}</span>' for i, name in enumerate(names[:COLOURS]))
    more = f"<span>and {len(names) - COLOURS} more in grey</span>" if len(names) > COLOURS else ""
    return f"<p class=legend>{keys}{more}</p>"


def _curve(name: str, number: int, points: Points, x: _Axis, y: _Axis) -> str:
    colour, label = f"c{number}" if number < COLOURS else "rest", html.escape(name)
    places = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in points]
    path = " ".join(f"{left},{height}" for left, height in places)
    dots = places if (len(places) <= MOST_DOTS and colour != "rest") or len(places) == 1 else []
    return f'<polyline class="{colour}" data-name="{label}" points="{path}"></polyline>' + "".join(
        f'<circle class="{colour}" cx="{left}" cy="{height}" r="2"/>' for left, height in dots
    )


def highest_shown(curves: Sequence[Points]) -> float:
    """The end of an axis: one trial that diverged must not make all others, the best first, one flat line."""
    best = [value for points in curves[:COLOURS] for _, value in points]
    return 3 * max(best) if len(curves) > 1 and best and max(best) > 0 else math.inf


def trial_charts(trials: Sequence[TrialRow]) -> str:
    """The training loss and each metric of all trials, the best ones in colour."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.tests))
    series = {"training loss": [points_of(trial.losses) for trial in trials]}
    series |= {f"test {name}": [points_of(trial.tests.get(name, {})) for trial in trials] for name in names}
    labels = [trial_label(trial) for trial in trials]
    charts = []
    for title, curves in series.items():
        charts.append(chart(title, dict(zip(labels, curves)), with_legend=False, top=highest_shown(curves)))
    return f'<div class="charts">{"".join(charts)}</div>{legend(labels)}'


def trial_label(trial: TrialRow) -> str:
    """The number and the values of a trial, short."""
    values = ", ".join(f"{key.rpartition('.')[2]} {show_value(each)}" for key, each in trial.values.items())
    return f"{trial.number}: {values}"[:60]


def parallel_coordinates(trials: Sequence[TrialRow]) -> str:
    """A line for each trial across an axis for each of its values and, last, each of its metrics."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.values))
    metrics = list(dict.fromkeys(name for trial in trials for name in trial.metrics))
    columns = [(key, [trial.values.get(key) for trial in trials]) for key in keys]
    columns += [(f"test {name}", [trial.metrics.get(name) for trial in trials]) for name in metrics]
    if len(trials) < 2 or len(columns) < 2:
        return ""
    width = max(WIDTH, 160 * len(columns))
    axes = [_column_axis(values) for _, values in columns]
    at = [60 + (width - 120) * i / (len(columns) - 1) for i in range(len(columns))]
    parts, texts = [], []
    for (name, _), axis, left in zip(columns, axes, at):
        parts.append(
            f'<line class="axis" x1="{left:.0f}" x2="{left:.0f}" y1="{TOP + 20}" y2="{HEIGHT - 8}"/>'
        )
        short = html.escape(name.rpartition(".")[2])
        texts.append(f'<text x="{left:.0f}" y="{TOP + 6}" text-anchor="middle">{short}</text>')
        texts += [
            f'<text x="{left + 5:.0f}" y="{height + 4:.1f}">{html.escape(text)}</text>'
            for text, height in axis.labels()
        ]
    for number, trial in reversed(list(enumerate(trials))):
        places = [axis.height(values[number]) for (_, values), axis in zip(columns, axes)]
        path = " ".join(f"{left:.0f},{y:.1f}" for left, y in zip(at, places) if y is not None)
        colour = f"c{number}" if number < COLOURS else "rest"
        title = f"<title>{html.escape(trial_label(trial))}</title>"
        parts.append(f'<polyline class="{colour}" points="{path}">{title}</polyline>')
    label = "values and metrics of the trials"
    return (
        f"<figure class=wide><figcaption>{label}: the {min(COLOURS, len(trials))} best in colour</figcaption>"
        f'<div class=scroll><svg style="min-width:{width}px;max-width:{1.25 * width}px" role="img" '
        f'viewBox="0 0 {width} {HEIGHT}" aria-label="{label}">{"".join(parts + texts)}</svg></div></figure>'
    )


class _Axis:
    """A linear or logarithmic scale from values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool) -> None:
        self._is_log = is_log
        if low == high:
            low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05
        self._low, self._high = self._scaled(low), self._scaled(high)
        self._start, self._end = start, end

    @property
    def scale(self) -> tuple[float, float, float, float]:
        """The first and last place, and the (scaled) values there."""
        return self._start, self._end, self._low, self._high

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def __call__(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._is_log and self._high - self._low >= 1:
            first, last = math.ceil(self._low), math.floor(self._high)
            return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 4))]
        low, high = (10**self._low, 10**self._high) if self._is_log else (self._low, self._high)
        unit = 10.0 ** math.floor(math.log10((high - low) / 4))
        step = next(unit * each for each in (1, 2, 5, 10) if unit * each * 5 >= high - low)
        return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


class _NumberColumn:
    def __init__(self, values: Sequence[float]) -> None:
        is_log = min(values) > 0 and max(values) >= 100 * min(values)
        self._low, self._high = min(values), max(values)
        self._axis = _Axis(self._low, self._high, HEIGHT - 14, TOP + 26, is_log)

    def height(self, value: Any) -> float | None:
        return self._axis(value) if _is_number(value) else None

    def labels(self) -> list[tuple[str, float]]:
        return [(show_value(each), self._axis(each)) for each in dict.fromkeys((self._low, self._high))]


class _NameColumn:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._axis = _Axis(0, len(names) - 1, HEIGHT - 14, TOP + 26, False)

    def height(self, value: Any) -> float | None:
        return self._axis(self._names.index(str(value)))

    def labels(self) -> list[tuple[str, float]]:
        return [(name[:24], self._axis(number)) for number, name in enumerate(self._names)]


def _column_axis(values: Sequence[Any]) -> _NumberColumn | _NameColumn:
    known = [value for value in values if value is not None]
    if known and all(_is_number(value) or isinstance(value, float) for value in known):
        finite = [value for value in known if _is_number(value)]
        return _NumberColumn(finite or [0.0])
    return _NameColumn(list(dict.fromkeys(str(value) for value in values)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _last(value: float) -> str:
    """The last value of a curve, to four digits and without an exponent where it has few."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else show_value(value)


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return f"{value:,.6g}"
