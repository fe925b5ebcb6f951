"""The planner on the graphs that PipeDream's profiler measured: how good, how fast, how near to optimal.

PipeDream's own bottlenecks and CPU seconds are those of its optimizer on the same files.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from plait.graph import Edge, Graph, Node, pipedream
from plait.planner import Cluster, Plan, machines, make_plan
from plait_bench.harness import Bench, BenchClaim, Row, at_most, number, say, spread
from plait_bench.pictures import bars, picture

PROFILES = Path(__file__).parent / "profiles"
CLUSTERS = {
    "4": machines(4, 1e9),
    "16": machines(16, 1.25e9),
    "4x4": machines((4, 4), (10e9, 1.25e9)),
}


@dataclass(frozen=True)
class Published:
    """What PipeDream's optimizer found and how long it took; None where it did not finish."""

    bottleneck_s: float | None
    cpu_s: float | None


PUBLISHED: dict[str, tuple[Published, Published, Published]] = {
    "alexnet": (Published(0.034217, 0.22), Published(0.015099, 0.26), Published(0.015099, 0.25)),
    "vgg16": (Published(0.205521, 0.23), Published(0.054795, 0.42), Published(0.067134, 0.40)),
    "resnet18": (Published(0.100004, 0.31), Published(0.024425, 1.6), Published(0.023493, 3.2)),
    "squeezenet1_0": (Published(0.074414, 0.31), Published(0.018772, 1.6), Published(0.018618, 3.2)),
    "gnmt": (Published(0.025868, 0.29), Published(0.017125, 1.2), Published(0.011081, 2.4)),
    "resnet50": (Published(0.162881, 0.86), Published(0.043848, 8.4), Published(0.043208, 50.0)),
    "resnet101": (Published(0.116555, 2.3), Published(0.041819, 26.0), Published(0.052715, None)),
    "nasnetamobile": (Published(None, None), Published(None, None), Published(None, None)),
}


def run(quick: bool = False, repeats: int = 3, command: str = "plait bench planner") -> Bench:
    """Plan every profile for every cluster, `repeats` times each, and a chain of 1,000 layers.

    `quick` takes two repeats.
    """
    repeats = 2 if quick else repeats
    rows: list[Row] = []
    # The first plan of a process pays for loading numerical code; that is import time.
    make_plan(_long_chain(8), machines(2, 1e9))
    for index, name in enumerate(PUBLISHED, 1):
        say(f"planner, {name} ({index} of {len(PUBLISHED)})")
        rows += plan_profile(name, repeats)
    rows.append(_measure("chain of 1,000", _long_chain(1000), "64", machines(64, 1e9), None, 1))
    return Bench("planner", command, rows, _claims(rows))


def plan_profile(name: str, repeats: int = 1) -> list[Row]:
    """A row for the plan of one profile on each cluster."""
    graph = pipedream.read(PROFILES / f"{name}.txt").graph()
    return [
        _measure(name, graph, cluster, machine, theirs, repeats)
        for (cluster, machine), theirs in zip(CLUSTERS.items(), PUBLISHED[name])
    ]


def _measure(
    name: str, graph: Graph, cluster: str, machine: Cluster, theirs: Published | None, repeats: int
) -> Row:
    seconds, plans = [], []
    for _ in range(repeats):
        started = time.process_time()
        plans.append(make_plan(graph, machine))
        seconds.append(time.process_time() - started)
    plan: Plan = plans[0]
    return {
        "profile": name,
        "devices": cluster,
        "bottleneck_s": plan.bottleneck_s,
        "pipedream_bottleneck_s": theirs.bottleneck_s if theirs else None,
        "lower_bound_s": plan.lower_bound_s,
        "gap": plan.bottleneck_s / plan.lower_bound_s - 1,
        "exact": plan.exact,
        **spread(seconds, "cpu_s"),
        "pipedream_cpu_s": theirs.cpu_s if theirs else None,
        "stages": len(plan.stages),
        "devices_used": plan.devices_used,
        "repeats": repeats,
    }


def _claims(rows: list[Row]) -> list[BenchClaim]:
    """What was said before measuring, with what was found."""
    seconds = {(row["profile"], row["devices"]): number(row, "cpu_s") for row in rows}
    named = {key: value for key, value in seconds.items() if key[0] in PUBLISHED}
    others = [v for (profile, n), v in named.items() if profile != "nasnetamobile" and (profile, n) != _FIRST]
    worst = max(ratio(row) for row in rows)
    gap = max(number(row, "gap") for row in rows if row["profile"] in PUBLISHED)
    return [
        # The published bottlenecks have six decimals.
        at_most("bottleneck over PipeDream's, the worst of all", worst, 1),
        at_most("CPU seconds for resnet50 on 4x4", seconds[_FIRST], 0.25),
        at_most("CPU seconds for any other profile that PipeDream finished", max(others), 2.0),
        at_most("CPU seconds for nasnetamobile on 16", seconds["nasnetamobile", "16"], 10.0),
        at_most("distance from the proven bound, the worst of all profiles", gap, 0.05),
        at_most("CPU seconds for 1,000 layers on 64 devices", seconds["chain of 1,000", "64"], 5.0),
        at_most("peak memory of the process in bytes", peak_bytes(), 2e9),
    ]


_FIRST = ("resnet50", "4x4")


def ratio(row: Row) -> float:
    """Our bottleneck, rounded as PipeDream's was published, over theirs."""
    theirs = row["pipedream_bottleneck_s"]
    return round(number(row, "bottleneck_s"), 6) / float(theirs) if theirs else 0.0


def peak_bytes() -> float:
    """The most memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def write_plot(bench: Bench, path: Path) -> None:
    """CPU seconds by profile and cluster, ours with their spread and PipeDream's."""
    with picture(bench, path, (11, 8), down=len(CLUSTERS)) as axes:
        for axis, cluster in zip(axes, CLUSTERS):
            own = [row for row in bench.rows if row["devices"] == cluster]
            sides = [{**row, "side": "Plait"} for row in own]
            sides += [
                {**row, "side": "PipeDream (published)", **spread([seconds], "cpu_s")}
                for row in own
                if (seconds := number(row, "pipedream_cpu_s"))
            ]
            bars(axis, sides, lambda row: str(row["profile"]), "side", "cpu_s")
            axis.set(title=f"{cluster} devices", ylabel="CPU seconds", yscale="log")


def _long_chain(layers: int) -> Graph:
    """A chain whose layers take 1 to 7 ms, with 1 MB between them and 1 MB of parameters each."""
    nodes = tuple(
        Node(f"layer{i}", "Linear", 0.001 * (1 + i % 7), 0.002 * (1 + i % 5), 1e6, 1e6) for i in range(layers)
    )
    return Graph(nodes, tuple(Edge(f"layer{i}", f"layer{i + 1}", 1e6) for i in range(layers - 1)))
