"""Learning curves of fused trials on those of the same trials one after another, on real images.

In float64: in float32 a change of 1e-7 in the first weights moves the serial curve itself by up to 9% within
ten steps at a learning rate of 0.1, so there would be nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from plait.fusion import FusedOptimizer, Shared, fuse
from plait.workloads import data
from plait.workloads.resnet import resnet18_tiny
from plait_bench.fusion.cases import one_thread
from plait_bench.harness import Bench, Found, Row, at_most, number, say
from plait_bench.pictures import picture

MODEL = "resnet18-tiny"
# One step of each curve in this many becomes a row.
SHOWN = 5
_POINTS = ("step", "serial_loss", "fused_loss")
RATES = (0.01, 0.05, 0.2)
STEPS, QUICK_STEPS = 60, 20
SEEDS = (0, 1, 2)
BATCH, QUICK_BATCH = 64, 16
# Rounding that sixty steps of momentum carry on; a wrong gradient shows in the first digits.
TOLERANCE = 1e-4


def run(quick: bool = False, command: str = "plait bench fusion-convergence") -> Bench:
    """Three learning rates from each of three seeds; `quick` takes two, fewer steps and smaller batches."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    course = (QUICK_STEPS, device, SEEDS[:2], QUICK_BATCH) if quick else (STEPS, device, SEEDS, BATCH)
    rows, claims = convergence(RATES, *course)
    return Bench("fusion-convergence", command, rows, claims)


def convergence(
    rates: Sequence[float] = RATES,
    steps: int = STEPS,
    device: torch.device | None = None,
    seeds: Sequence[int] = SEEDS,
    batch: int = BATCH,
) -> Found:
    """The loss at each step of each learning rate, serial and fused, and whether the curves meet."""
    place = device or torch.device("cpu")
    rows: list[Row] = []
    apart = 0.0
    for seed in seeds:
        say(f"fusion-convergence, seed {seed}: {len(rates)} learning rates, {steps} steps")
        with one_thread(place):
            batches = _batches(steps, place, seed, batch)
            serial = [_serial(rate, batches, place, seed) for rate in rates]
            fused = _fused(rates, batches, place, seed)
        for rate, own, others in zip(rates, serial, zip(*fused)):
            pairs = list(enumerate(zip(own, others), 1))
            apart = max(apart, *(abs(one - other) / max(one, 1e-2) for _, (one, other) in pairs))
            rows += [
                {
                    "model": MODEL,
                    "lr": rate,
                    "seed": seed,
                    "step": step,
                    "serial_loss": one,
                    "fused_loss": other,
                }
                for step, (one, other) in pairs
                if step == 1 or step % SHOWN == 0
            ]
    words = (
        f"{MODEL} on digits, {len(rates)} learning rates, {len(seeds)} seeds: "
        f"largest distance of a fused loss from the serial"
    )
    return rows, [at_most(words, apart, TOLERANCE, " of it")]


def _batches(
    steps: int, device: torch.device, seed: int, batch: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    train_set: Any = data.build("digits", "train")
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for step in range(steps):
        begin = step * batch % (len(order) - batch)
        x, y = train_set.collated_batch(order[begin : begin + batch])
        found.append((x.to(device, torch.float64), y.to(device)))
    return found


def _model(device: torch.device, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed + 1)
    return resnet18_tiny(10, 1).to(device, torch.float64)


def _serial(
    rate: float, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device, seed: int
) -> list[float]:
    model = _model(device, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _fused(
    rates: Sequence[float],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    seed: int,
) -> list[list[float]]:
    fused = fuse([_model(device, seed) for _ in rates])
    optimizer = FusedOptimizer(fused, "sgd", lr=list(rates), momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        own = fused.map(F.cross_entropy, fused(Shared(x)), Shared(y))
        own.sum().backward()
        optimizer.step()
        losses.append(own.tolist())
    return losses


def write_plot(bench: Bench, path: Path) -> None:
    """Serial curves as lines, fused ones as points on them, a panel for each seed."""
    seeds = list(dict.fromkeys(row["seed"] for row in bench.rows))
    with picture(bench, path, (4.5 * len(seeds), 4.0), across=len(seeds), sharey=True) as axes:
        for axis, seed in zip(axes, seeds):
            own = [row for row in bench.rows if row["seed"] == seed]
            for place, rate in enumerate(dict.fromkeys(row["lr"] for row in own)):
                curve = [row for row in own if row["lr"] == rate]
                steps, serial, fused = ([number(row, name) for row in curve] for name in _POINTS)
                axis.plot(steps, serial, color=f"C{place}", label=f"lr {rate}, serial")
                axis.plot(steps, fused, "o", color=f"C{place}", label=f"lr {rate}, fused")
            axis.set(xlabel="step", yscale="log", title=f"{MODEL} on digits, seed {seed}")
        axes[0].set_ylabel("training loss")
        axes[0].legend(fontsize=8)
