"""`plait profile` and `plait plan`: measure a model, and partition it over devices."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.os_errors import os_errors_as_messages
from plait.cli.train import (
    HostsOption,
    JsonFlag,
    NicOption,
    NodesOption,
    OnOption,
    SetOption,
    WorkersOption,
    placement_overrides,
)
from plait.core.codec import encode
from plait.core.errors import InputError
from plait.core.names import check_extra, searching
from plait.core.shown import shown
from plait.core.units import parse_bytes, show_bytes, show_seconds
from plait.schema.plans.schedules import Schedule

if TYPE_CHECKING:
    from plait.planner import Cluster, Device, Plan
    from plait.profiler.profile import Profile
    from plait.schema.placement import Placement
    from plait.schema.plans.graph import Graph
    from plait.schema.settings import TrainSettings


def profile(
    job: Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", help="Where to write. [default: NAME.profile.json]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in a microbatch. [default: the job's batch]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured steps; their median counts.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each measured worker.")] = 1,
    links: Annotated[
        bool, typer.Option(help="Measure on all of the job's workers at once, with their links and sums.")
    ] = True,
    graph: Annotated[Path | None, typer.Option(help="Write PipeDream's graph.txt here too.")] = None,
    workers: WorkersOption = None,
    hosts: HostsOption = None,
    nic: NicOption = None,
    on: OnOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Measure a job's model layer by layer: seconds, bytes, and the links between its workers.

    Example: plait profile examples/digits.yaml --batch 16
    """
    from plait.launcher.environment import check_alone
    from plait.launcher.launchers.attempts import on_hosts
    from plait.schema.job import read_job

    check_alone()
    where = placement_overrides(workers, hosts, nic, on, nodes)
    asked = read_job(job, [*(set_ or []), *where])
    with on_hosts(asked) as here, searching(os.getcwd(), asked.folder):
        placement = replace(here.placement, threads=threads)
        together = links and sum(host.slots for host in placement.hosts) > 1
        measured = _measure(asked.settings(), placement, batch, repeats, together, quiet or json_)
    from plait.profiler.profile import save_profile

    target = output or Path(f"{asked.name}.profile.json")
    with os_errors_as_messages():
        save_profile(measured, target)
        if graph is not None:
            from plait.graph import pipedream

            pipedream.write(pipedream.from_graph(measured.graph), graph)
    if json_:
        print(json.dumps(_profile_summary(measured, target)))
    else:
        _show_profile(measured, target, graph)


def _measure(
    settings: TrainSettings,
    placement: Placement,
    batch: int | None,
    repeats: int,
    together: bool,
    quiet: bool,
) -> Profile:
    """Measure in this process or, as `parallel.plan: auto` does, on all of the job's workers at once."""
    from rich.console import Console
    from rich.progress import Progress

    from plait.measure.profile_job import ProfileRequest, profile_job, profile_together

    console, verify = Console(stderr=True), settings.verify.start != "off"
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(f"measuring{' on all workers at once' if together else ''}", total=None)
        if together:
            size = batch or settings.data.batch_size
            (measured,) = profile_together(
                ProfileRequest(settings, (size,), repeats, verify=verify), placement
            )
            return measured
        return profile_job(
            settings,
            batch,
            threads=placement.threads,
            repeats=repeats,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
            verify=verify,
        )


def _profile_summary(measured: Profile, target: Path) -> dict[str, Any]:
    graph = measured.graph
    return {
        "profile": str(target),
        "model": measured.model,
        "device": measured.device,
        "dtype": measured.dtype,
        "batch": measured.batch,
        "torch_version": measured.torch_version,
        "layers": len(graph.nodes),
        "step_s": measured.step.seconds,
        "layers_s": graph.compute_s(),
        "verified_s": measured.verified_s,
        "notes": list(measured.notes),
        "warnings": [warning] if (warning := measured.doubts()) else [],
        "parameter_bytes": graph.parameter_bytes(),
        "links": encode(measured.links),
        "sums": encode(measured.sums),
    }


def _show_profile(measured: Profile, target: Path, graph: Path | None) -> None:
    nodes, step, batch = measured.graph.nodes, measured.step, measured.batch
    print(f"{measured.model}: {len(nodes)} layers on {measured.device}, batch {batch}, {measured.dtype}")
    print(
        f"{show_seconds(step.seconds)} a step (spread {show_seconds(step.spread_s)}); the layers add up to "
        f"{measured.coverage:.0%} of it; {show_bytes(measured.graph.parameter_bytes())} of weights"
    )
    if warning := measured.doubts():
        print(f"warning: {warning}")
    if measured.verified_s:
        print(f"verified in {show_seconds(measured.verified_s)}: the layers compute what the model computes")
    for note in measured.notes:
        print(f"verify: {note}")
    for node in sorted(nodes, key=lambda node: -node.compute_s)[:5]:
        times = f"forward {show_seconds(node.forward_s):>8}  backward {show_seconds(node.backward_s):>8}"
        sizes = f"output {show_bytes(node.output_bytes):>8}  weights {show_bytes(node.parameter_bytes):>8}"
        print(f"  {node.id:28} {times}  {sizes}")
    if measured.links:
        low, *_, high = sorted(link.bytes_per_s for link in measured.links)
        worst = show_seconds(max(link.latency_s for link in measured.links))
        print(f"links: {show_bytes(low)}/s to {show_bytes(high)}/s, latency up to {worst}")
    for each in measured.sums:
        latency = show_seconds(each.latency_s)
        print(f"sums of {each.workers} workers: {show_bytes(each.bytes_per_s)}/s, latency {latency}")
    if graph is not None:
        print(f"wrote {graph} (PipeDream's format)")
    rates = "" if measured.links else " --bandwidth 1e9"
    print(f"wrote {target}; next: plait plan {target} --devices {max(2, _ranks(measured))}{rates}")


def _ranks(measured: Profile) -> int:
    return 1 + max((max(link.source, link.target) for link in measured.links), default=0)


def plan(
    profile: Annotated[
        Path, typer.Argument(help="A profile (JSON) or PipeDream's graph.txt.", show_default=False)
    ],
    devices: Annotated[str, typer.Option(help="4, or 4x4 with the devices of a host first.")] = "2",
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes/s of each level, innermost first: 10e9,1.25e9. [default: measured]"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a device, such as 16GB.")] = None,
    speeds: Annotated[str | None, typer.Option(help="Relative speed of each device: 1,1,0.5,0.5.")] = None,
    memories: Annotated[str | None, typer.Option(help="Memory of each device: 16GB,16GB,8GB,8GB.")] = None,
    schedule: Annotated[
        str, typer.Option(help=f"{', '.join(Schedule)}; 1f1b is flush.")
    ] = Schedule.STASH.value,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches a step. [default: chosen]")] = None,
    pipelines: Annotated[int, typer.Option(help="Pipelines side by side.")] = 1,
    straight: Annotated[bool, typer.Option("--straight", help="No replicas within a pipeline.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute activations in backward.")
    ] = False,
    hide_messages: Annotated[
        bool,
        typer.Option("--hide-messages", help="Keep more microbatches in flight if messages are slow."),
    ] = False,
    optimizer_copies: Annotated[
        float, typer.Option(help="Optimizer state per weight: 0 SGD, 1 momentum, 2 Adam.")
    ] = 1.0,
    output: Annotated[
        Path | None, typer.Option("-o", help="Where to write. [default: NAME.plan.json]")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw the predicted schedule (PNG).")] = None,
    to_code: Annotated[
        Path | None, typer.Option(help="Write each stage as a Python module; needs --job.")
    ] = None,
    job: Annotated[Path | None, typer.Option(help="The job whose model --to-code writes.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Plan how to partition a profiled model over devices: stages, replicas, schedule.

    Example: plait plan digits.profile.json --devices 4 --bandwidth 1e9
    """
    from plait.planner import MemorySettings, Settings, fastest_plan, render_plan, save_plan, summary

    if to_code is not None and job is None:
        raise InputError("--to-code: needs --job JOB, the job file whose model it writes")
    if timeline is not None:
        check_extra("matplotlib", "--timeline")
    graph, measured = _read_graph(profile)
    cluster = _cluster(devices, bandwidth, memory, speeds, memories, measured)
    if not 0 <= optimizer_copies <= 1000:
        raise InputError(
            f"--optimizer-copies: found {optimizer_copies:g}, expected 0 or more, such as 2 for Adam"
        )
    settings = Settings(
        _schedule(schedule),
        microbatches,
        pipelines,
        straight,
        MemorySettings(optimizer_copies, recompute),
        hide_messages=hide_messages,
    )
    made = fastest_plan(graph, cluster, settings)
    made = replace(made, microbatch_samples=measured.batch if measured is not None else None)
    target = output or profile.with_name(profile.name.split(".")[0] + ".plan.json")
    with os_errors_as_messages():
        save_plan(made, target)
    wrote = [str(target), *_extras(made, measured, timeline, to_code, job)]
    if json_:
        print(json.dumps({**summary(made), "plan": str(target)}))
        return
    print(render_plan(made))
    print(f"\nwrote {', '.join(wrote)}; next: plait train JOB --plan {target}")


def _read_graph(path: Path) -> tuple[Graph, Profile | None]:
    """The graph in `path`, and the profile if the file is one."""
    if path.suffix in (".yaml", ".yml"):
        raise InputError(f"{path}: a job file, expected its profile; make it with: plait profile {path}")
    if path.suffix == ".json":
        from plait.profiler.profile import load_profile  # imports torch

        measured = load_profile(path)
        return measured.loaded_graph(), measured
    from plait.graph import pipedream

    return pipedream.read(path).graph(), None


def _cluster(
    devices: str,
    bandwidth: str | None,
    memory: str | None,
    speeds: str | None,
    memories: str | None,
    measured: Profile | None,
) -> Cluster:
    from plait.planner import PlanError, machines, measured_machines

    counts = tuple(_number(part, "--devices", int, "4 or 4x4") for part in devices.split("x"))
    limit = float(parse_bytes(memory, "--memory")) if memory is not None else None
    try:
        each = _each_device(speeds, memories)
        if bandwidth is None and measured is not None and measured.links:
            return measured_machines(
                counts, measured.links, measured.sums, limit, each, overhead_s=measured.overhead_s
            )
        return machines(counts, _rates(bandwidth, counts), limit, each)
    except PlanError as failure:
        raise InputError(f"--devices, --bandwidth, --speeds: {failure}") from None


def _rates(bandwidth: str | None, counts: tuple[int, ...]) -> tuple[float, ...]:
    """Bytes/s of each level of devices."""
    if bandwidth is not None:
        return tuple(
            _number(part, "--bandwidth", float, "1e9 or 10e9,1.25e9") for part in bandwidth.split(",")
        )
    if counts == (1,):
        return (1e9,)
    raise InputError(
        "--bandwidth: missing, and no links were measured; "
        "expected bytes/s of each level, innermost first, such as 1e9 or 10e9,1.25e9"
    )


def _each_device(speeds: str | None, memories: str | None) -> tuple[Device, ...]:
    from plait.planner import Device

    factors = [_number(s, "--speeds", float, "1,1,0.5") for s in speeds.split(",")] if speeds else []
    sizes = [float(parse_bytes(m, "--memories")) for m in memories.split(",")] if memories else []
    if factors and sizes and len(factors) != len(sizes):
        raise InputError(
            f"--speeds and --memories: found {len(factors)} and {len(sizes)} devices; expected as many"
        )
    count = max(len(factors), len(sizes))
    return tuple(Device(factors[i] if factors else 1.0, sizes[i] if sizes else None) for i in range(count))


def _number(text: str, key: str, kind: type[int] | type[float], example: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{key}: found {shown(text)}, expected a number as in {example}") from None


def _schedule(name: str) -> Schedule:
    from plait.core.names import did_you_mean
    from plait.schema.aliases import VALUE_ALIASES, canonical_value

    names, canonical = [s.value for s in Schedule], canonical_value("parallel.schedule", name)
    if canonical not in names:
        hint = did_you_mean(name, [*names, *VALUE_ALIASES["parallel.schedule"]])
        raise InputError(f"--schedule: found {shown(name)}, expected a schedule{hint}")
    return Schedule(canonical)


def _extras(
    made: Plan, measured: Profile | None, timeline: Path | None, to_code: Path | None, job: Path | None
) -> list[str]:
    """Write the timeline and the code of the stages, if requested; returns their paths."""
    wrote = []
    if timeline is not None:
        from plait.planner import draw_plan

        with os_errors_as_messages():
            draw_plan(made, timeline)
        wrote.append(str(timeline))
    if to_code is not None and job is not None:
        from plait.measure.profile_job import trace_job, verify_job
        from plait.pipeline.cutting.to_code import write_code
        from plait.schema.job import read_job

        asked = read_job(job)
        settings = asked.settings()
        if measured is not None and measured.model != settings.model.factory:
            raise InputError(
                f"--job: {job} has the model {settings.model.factory}, but the profile is of {measured.model}"
            )
        stages = [stage.layers for stage in made.stages]
        with searching(os.getcwd(), asked.folder):
            traced = trace_job(settings)
            if settings.verify.start != "off":
                verify_job(settings, traced, stages)
            with os_errors_as_messages():
                written = write_code(traced, stages, to_code)
        wrote += [str(path) for path in written]
    return wrote
