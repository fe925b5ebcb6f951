"""The pictures of docs/concepts.md and docs/code.md: `python docs/pictures/draw.py` writes them."""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; fill: #57606a }
.back { fill: #f6f8fa } .box { fill: #ffffff; stroke: #8c959f } .idle { fill: #d8dee4 }
.line { stroke: #57606a; stroke-width: 1.5; fill: none } .mark { stroke: #cf222e; stroke-width: 2.5 }
.c0 { fill: #54aeff } .c1 { fill: #4ac26b } .c2 { fill: #d4a72c } .c3 { fill: #c297ff }
.bar { font-size: 13px; fill: #0b1117 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9da7b3 } .back { fill: #161b22 }
.box { fill: #21262d; stroke: #6e7681 } .idle { fill: #373e47 } .line { stroke: #9da7b3 }
.bar { fill: #0b1117 }
}
"""
ARROW = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" style="fill:#8c959f"/></marker>'
)


class Picture:
    """Shapes of one SVG file, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.shapes = [f'<rect class="back" width="{width}" height="{height}" rx="10"/>']
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
            f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{ARROW}</defs>"
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        self.shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
        )
        if label:
            style = "bar" if kind.startswith("c") else ""
            self.text(x + width / 2, y + height / 2 + 5, label, style, "middle")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.shapes.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, *points: tuple[float, float], kind: str = "line", arrow: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = ' marker-end="url(#head)"' if arrow else ""
        self.shapes.append(f'<polyline class="{kind}" points="{path}"{end}/>')

    def svg(self) -> str:
        return "\n".join([self.head, *self.shapes, "</svg>\n"])


def pipeline() -> Picture:
    """Three stages, four microbatches a step, forward and backward in turn."""
    from plait.planner.schedules.operations import Backward, Forward
    from plait.planner.schedules.orders import operations
    from plait.schema.plans.plan import Layout
    from plait.schema.plans.schedules import Schedule

    picture, stages, count = Picture(760, 216, "three stages work on four microbatches"), 3, 4
    given = operations(Schedule.FLUSH, Layout(((0,), (1,), (2,))), count)
    orders = [[op for op in given[worker] if isinstance(op, Forward | Backward)] for worker in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    free, unit = [0.0] * stages, 32
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                op = order[0]
                is_forward = isinstance(op, Forward)
                before = stage - 1 if is_forward else stage + 1
                kind, b = ("F", op.microbatch) if is_forward else ("B", op.microbatch)
                inner = 0 <= before < stages
                needed = done.get((kind, before, b)) if inner else done.get(("F", stage, b), 0.0)
                if needed is None:
                    break
                start = max(free[stage], needed)
                free[stage] = done[kind, stage, b] = start + (1 if is_forward else 2)
                width = unit * (1 if is_forward else 2) - 2
                picture.box(96 + unit * start, 44 + 44 * stage, width, 36, f"c{b}", f"{kind}{b}")
                order.pop(0)
    end = max(free)
    for stage in range(stages):
        picture.text(16, 67 + 44 * stage, f"stage {stage}")
        picture.box(100 + unit * end, 44 + 44 * stage, 60, 36, "box", "update")
    picture.text(96, 28, "one step: four microbatches, F forward, B backward; gaps are idle time", "small")
    picture.line((96, 190), (100 + unit * end, 190), arrow=True)
    picture.text(16, 194, "time", "small")
    return picture


def sync() -> Picture:
    """One slow worker of three, under all-reduce and under partial reduce."""
    picture = Picture(760, 310, "all-reduce waits for the slowest worker; partial reduce does not")
    for top, name, rows in (
        (24, "all-reduce: each step takes as long as the slowest worker", None),
        (170, "partial reduce: groups form from the workers that are ready", [0, 1, 2]),
    ):
        picture.text(96, top, name, "small")
        for worker in range(3):
            y, slow = top + 12 + 36 * worker, worker == 2
            picture.text(16, y + 20, f"worker {worker}")
            if rows is None:
                for step in range(2):
                    x = 96 + 300 * step
                    picture.box(x, y, 282 if slow else 92, 28, f"c{worker}")
                    if not slow:
                        picture.box(x + 94, y, 188, 28, "idle", "waits")
            else:
                length = 294 if slow else 94
                for step in range(2 if slow else 6):
                    picture.box(96 + (length + 6) * step, y, length, 28, f"c{worker}")
        for at in range(1, 3 if rows is None else 7):
            x = 96 + (300 * at - 9 if rows is None else 100 * at - 3)
            all_meet = rows is None or at % 3 == 0
            picture.line((x, top + 8), (x, top + (116 if all_meet else 80)))
    picture.text(
        96, 302, "a vertical line: these workers take the mean of their gradients or weights", "small"
    )
    return picture


def fused() -> Picture:
    """Three models with their own learning rates, and the one that is trained."""
    picture = Picture(760, 210, "three trials become one module with a trials axis")
    for trial, rate in enumerate(("0.1", "0.03", "0.01")):
        y = 40 + 52 * trial
        picture.box(24, y, 130, 40, f"c{trial}", "weight 64 x 32")
        picture.text(166, y + 25, f"trial {trial}, lr {rate}")
    picture.line((300, 112), (372, 112), arrow=True)
    picture.text(336, 100, "plait.fuse", "small", "middle")
    for trial in (2, 1, 0):
        picture.box(396 + 22 * trial, 92 - 26 * trial, 150, 62, f"c{trial}", "" if trial else "3 x 64 x 32")
    picture.text(610, 76, "one tensor a weight,", "small")
    picture.text(610, 94, "trials axis first;", "small")
    picture.text(610, 112, "one product for all;", "small")
    picture.text(610, 130, "lr is a vector", "small")
    picture.text(24, 28, "three models", "small")
    picture.text(396, 28, "one fused module", "small")
    return picture


def elastic() -> Picture:
    """A worker is lost, its step is taken again, and another joins."""
    picture = Picture(760, 236, "a worker is lost in step 3; a new one joins after step 4")
    starts, width = (96, 206, 316, 426, 536, 646), 104
    names = ("step 1", "step 2", "step 3", "step 3", "step 4", "step 5")
    for x, name in zip(starts, names):
        picture.text(x + width / 2, 28, name + (" again" if x == 426 else ""), "small", "middle")
    members = ((0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (0, 2, 3))
    for x, present in zip(starts, members):
        for worker in present:
            broken = x == 316
            share = f"1/{len(present)} of batch"
            length = 52 if broken and worker == 1 else width
            kind = "idle" if broken else f"c{worker}"
            picture.box(
                x,
                42 + 40 * worker,
                length,
                32,
                kind,
                "undone" if broken and worker != 1 else "" if broken else share,
            )
    for worker in range(4):
        picture.text(16, 63 + 40 * worker, f"worker {worker}")
    picture.line((360, 86), (376, 110), kind="mark")
    picture.line((376, 86), (360, 110), kind="mark")
    picture.text(384, 103, "killed", "small")
    picture.text(430, 183, "starts, imports, builds the model", "small")
    picture.line((424, 178), (372, 178), kind="line")
    picture.text(96, 222, "membership: version 1 (0, 1, 2), version 2 (0, 2), version 3 (0, 2, 3)", "small")
    return picture


PACKAGES = (
    ("values and files", ("core", "schema", "workloads", "callbacks", "data")),
    ("processes and links", ("comm", "launcher", "verification")),
    ("measure and plan", ("graph", "profiler", "planner")),
    ("compute together", ("sync", "pipeline", "fusion", "adapt")),
    ("train", ("api", "training", "measure", "sweeping")),
    ("what people see", ("report", "jobs", "cli")),
)


def packages() -> Picture:
    """The packages in their order, and what travels between them."""
    picture = Picture(760, 362, "the packages of Plait; a package imports only those above it")
    for row, (title, names) in enumerate(PACKAGES):
        y = 20 + 56 * row
        picture.text(24, y + 25, title, "small")
        for column, name in enumerate(names):
            picture.box(190 + 106 * column, y, 98, 38, f"c{row % 4}", name)
    picture.line((738, 340), (738, 24), arrow=True)
    picture.text(730, 356, "imports", "small", "end")
    return picture


PICTURES = {each.__name__: each for each in (pipeline, sync, fused, elastic, packages)}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw().svg())
