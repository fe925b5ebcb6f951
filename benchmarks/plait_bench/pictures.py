"""The pictures of experiments: bars and curves of rows, each with its spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.core.files import write_picture
from plait_bench.harness import Bench, Row, number, say


@contextmanager
def picture(
    bench: Bench,
    path: Path,
    size: tuple[float, float],
    down: int = 1,
    across: int = 1,
    dpi: int = 120,
    **options: Any,
) -> Iterator[list[Any]]:
    """Axes to draw on within; afterwards they are the PNG at `path`, with how they came about below them."""
    import matplotlib  # loaded only where a picture is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, **options)
    yield list(axes.flat)
    machine = bench.machine["gpu"] or f"{bench.machine['cores']} cores ({bench.machine['architecture']})"
    origin = f"{bench.command}; {machine}, torch {bench.versions.get('torch', '-')}, {bench.date}"
    figure.text(0.01, 0.06 / size[1], origin, fontsize=7, color="0.4")
    figure.tight_layout(rect=(0.0, 0.18 / size[1], 1.0, 1.0))
    write_picture(path, figure, dpi=dpi)
    plt.close(figure)


def draw_spread(axis: Any, at: Sequence[float], rows: Sequence[Row], value: str, colour: str) -> None:
    """A line from the least to the most of column `value`, for each row that has both."""
    for x, row in zip(at, rows):
        if f"{value}_min" in row:
            axis.vlines(x, number(row, f"{value}_min"), number(row, f"{value}_max"), colour, linewidth=1)


def curve(
    axis: Any, rows: Sequence[Row], x: str, y: str, label: str, colour: str | None = None, marker: str = "o"
) -> None:
    """A line of column `y` over column `x`, with the spread of each point."""
    at = [number(row, x) for row in rows]
    (line,) = axis.plot(at, [number(row, y) for row in rows], marker=marker, label=label, color=colour)
    draw_spread(axis, at, rows, y, line.get_color())


def bars(
    axis: Any,
    rows: Sequence[Row],
    group: Callable[[Row], str],
    side: str,
    value: str,
    colours: Sequence[str] = (),
) -> None:
    """A bar of column `value` for each row: those of one `group` stand together, a colour for each side.

    Where there is one group, the sides are named below their bars. A line on each bar shows the `spread`,
    where the rows have one. `colours` are all sides of a picture with several axes: a side has one colour in
    all of them.
    """
    groups = list(dict.fromkeys(group(row) for row in rows))
    names = list(dict.fromkeys(str(row[side]) for row in rows))
    for index, name in enumerate(names):
        own = {group(row): row for row in rows if str(row[side]) == name}
        at = [groups.index(each) + 0.8 * (index - (len(names) - 1) / 2) / len(names) for each in own]
        heights = [number(row, value) for row in own.values()]
        colour = f"C{(list(colours) or names).index(name) % 10}"
        axis.bar(at, heights, width=0.8 / len(names), label=name, color=colour)
        draw_spread(axis, at, list(own.values()), value, "0.2")
    if len(groups) == 1:
        places = [0.8 * (index - (len(names) - 1) / 2) / len(names) for index in range(len(names))]
        axis.set_xticks(places, names, fontsize=8)
        axis.set_xlabel(groups[0])
        axis.set_xlim(-0.5, 0.5)
        return
    words = [each.replace(" ", "\n") if len(groups) > 8 else each for each in groups]
    axis.set_xticks(range(len(groups)), words, fontsize=8)
    if len(names) > 1:
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_panels(
    bench: Bench,
    path: Path,
    panels: Mapping[str, tuple[Sequence[Row], str]],
    group: Callable[[Row], str],
    side: str,
) -> None:
    """A panel of `bars` below the other for each label, of a column of its rows; a side has one colour."""
    drawn = {label: panel for label, panel in panels.items() if panel[0]}
    if not drawn:
        say(f"no picture: {bench.name} draws {', '.join(panels)}, and was asked for none of these")
        return
    sides = list(dict.fromkeys(str(row[side]) for rows, _ in drawn.values() for row in rows))
    with picture(bench, path, (11, 4 * len(drawn)), down=len(drawn)) as axes:
        for axis, (label, (rows, column)) in zip(axes, drawn.items()):
            bars(axis, rows, group, side, column, sides)
            axis.set_ylabel(label)
