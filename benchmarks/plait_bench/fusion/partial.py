"""Partial fusion (HFTA's ablation): trials of a ResNet-18 of which more and more blocks are fused.

Blocks that are not fused run trial by trial within the array. The baseline is the same trials one after
another, each with its own optimizer; the sides take turns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from plait_bench.fusion.cases import Case, Step, cases_on, fused_step, one_thread, seconds_of, serial_step
from plait_bench.harness import (
    Bench,
    BenchClaim,
    Row,
    at_least,
    ends_of,
    ends_of_ratio,
    in_turns,
    number,
    say,
    spread,
)
from plait_bench.pictures import curve, picture

TRIALS = 8
# What is fused together, in the order of the model.
BLOCKS: Sequence[Sequence[str]] = (
    ("conv1", "norm1", "relu1"),
    *((f"block{group}_{index}",) for group in (2, 3, 4, 5) for index in (1, 2)),
    ("head",),
)
SERIAL = "one after another"
GOAL = 1.5


def run(quick: bool = False, command: str = "plait bench fusion-partial") -> Bench:
    """Time a step with none to all blocks fused; `quick` takes fewer rounds and numbers of blocks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = "resnet18" if device.type == "cuda" else "resnet18-tiny"
    counts = range(0, len(BLOCKS) + 1, 5 if quick else 2)
    say(f"fusion-partial, {TRIALS} trials of {model} on {device}: {len(counts)} arrays in turn")
    with one_thread(device):
        rows = measure(model, cases_on(device)[model], device, counts, 3 if quick else 10)
    return Bench("fusion-partial", command, rows, _claims(rows))


def measure(
    model: str, case: Case, device: torch.device, counts: Sequence[int], rounds: int, trials: int = TRIALS
) -> list[Row]:
    """A row for each number of fused blocks, and one for the trials one after another."""
    torch.manual_seed(0)
    alone = serial_step(case, device)
    steps = {str(count): _fused(case, device, count, trials) for count in counts}

    def seconds(step: Step, times: int) -> Callable[[bool], float]:
        return lambda _: times * seconds_of(step, device)

    sides = {SERIAL: seconds(alone, trials), **{name: seconds(step, 1) for name, step in steps.items()}}
    taken = in_turns(sides, rounds)
    serial_s = statistics.median(taken[SERIAL])
    return [
        {
            "model": model,
            "fused_blocks": None if name == SERIAL else int(name),
            "blocks": len(BLOCKS),
            "trials": trials,
            **spread([1e3 * each for each in own], "step_ms"),
            **spread([serial_s / each for each in own], "speedup"),
            "repeats": rounds,
        }
        for name, own in taken.items()
    ]


def _fused(case: Case, device: torch.device, count: int, trials: int) -> Step:
    unfused = [name for block in BLOCKS[count:] for name in block]
    step, inputs, _ = fused_step(case, device, trials, unfused)
    return lambda: step(*inputs)


def _claims(rows: Sequence[Row]) -> list[BenchClaim]:
    fused = {int(number(row, "fused_blocks")): row for row in rows if row["fused_blocks"] is not None}
    none, every = fused[min(fused)], fused[max(fused)]
    first, last = (number(row, "speedup") for row in (none, every))
    falls = [number(fused[count], "step_ms") for count in sorted(fused)]
    is_falling = all(after < before for before, after in itertools.pairwise(falls))
    return [
        at_least(
            "all blocks fused over none, in throughput",
            last / first,
            GOAL,
            ends=ends_of_ratio(every, none, "speedup"),
        ),
        at_least(
            "all blocks fused over the trials one after another", last, GOAL, ends=ends_of(every, "speedup")
        ),
        BenchClaim("each further block that is fused shortens the step", float(is_falling), "1", is_falling),
    ]


def write_plot(bench: Bench, path: Path) -> None:
    """Throughput over the trials one after another by the number of fused blocks, with its spread."""
    fused = [row for row in bench.rows if row["fused_blocks"] is not None]
    with picture(bench, path, (6, 4)) as (axis,):
        curve(axis, fused, "fused_blocks", "speedup", f"{fused[0]['trials']} trials in one array")
        axis.axhline(1.0, color="grey", linestyle="--", linewidth=1, label=SERIAL)
        axis.set(xlabel=f"fused blocks of {fused[0]['blocks']}", ylabel="throughput over serial")
        axis.set(title=str(fused[0]["model"]), xticks=[number(row, "fused_blocks") for row in fused])
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
