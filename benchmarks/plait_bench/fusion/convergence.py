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
from plait_bench.harness import BenchClaim, Found, Row, number, picture

MODEL = "resnet18-tiny"
# One step of each curve in this many becomes a row.
SHOWN = 5
_POINTS = ("step", "serial_loss", "fused_loss")
RATES = (0.01, 0.05, 0.2)
STEPS = 60
BATCH = 64
# Rounding that sixty steps of momentum carry on; a wrong gradient shows in the first digits.
TOLERANCE = 1e-4


def convergence(
    rates: Sequence[float] = RATES, steps: int = STEPS, device: torch.device | None = None
) -> Found:
    """The loss at each step of three learning rates, serial and fused, and whether the curves meet."""
    place = device or torch.device("cpu")
    torch.manual_seed(0)
    batches = _batches(steps, place)
    serial = [_serial(rate, batches, place) for rate in rates]
    fused = _fused(rates, batches, place)
    pairs = [list(zip(own, others)) for own, others in zip(serial, zip(*fused))]
    rows: list[Row] = [
        {"model": MODEL, "mode": "curve", "lr": rate, "step": step, "serial_loss": one, "fused_loss": other}
        for rate, own in zip(rates, pairs)
        for step, (one, other) in enumerate(own, 1)
        if step == 1 or step % SHOWN == 0
    ]
    apart = max(abs(one - other) / max(one, 1e-2) for own in pairs for one, other in own)
    words = (
        f"{MODEL} on digits, {len(rates)} learning rates: largest distance of a fused loss from the serial"
    )
    return rows, [BenchClaim(words, apart, f"<= {TOLERANCE:g} of it", apart <= TOLERANCE)]


def _batches(steps: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    train_set: Any = data.build("digits", "train")
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for step in range(steps):
        begin = step * BATCH % (len(order) - BATCH)
        x, y = train_set.collated_batch(order[begin : begin + BATCH])
        found.append((x.to(device, torch.float64), y.to(device)))
    return found


def _model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(1)
    return resnet18_tiny(10, 1).to(device, torch.float64)


def _serial(
    rate: float, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> list[float]:
    model = _model(device)
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
    rates: Sequence[float], batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> list[list[float]]:
    fused = fuse([_model(device) for _ in rates])
    optimizer = FusedOptimizer(fused, "sgd", lr=list(rates), momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        own = fused.map(F.cross_entropy, fused(Shared(x)), Shared(y))
        own.sum().backward()
        optimizer.step()
        losses.append(own.tolist())
    return losses


def write_curves(rows: Sequence[Row], path: Path) -> None:
    """The curves as a picture: serial ones as lines, fused ones as points on them."""
    curves = [row for row in rows if row["mode"] == "curve"]
    with picture(path, (6.0, 4.0)) as (axis,):
        for place, rate in enumerate(dict.fromkeys(row["lr"] for row in curves)):
            own = [row for row in curves if row["lr"] == rate]
            steps, serial, fused = ([number(row, name) for row in own] for name in _POINTS)
            axis.plot(steps, serial, color=f"C{place}", label=f"lr {rate}, serial")
            axis.plot(steps, fused, "o", color=f"C{place}", label=f"lr {rate}, fused")
        axis.set(xlabel="step", ylabel="training loss", yscale="log", title="ResNet-18 (tiny) on digits")
        axis.legend(fontsize=8)
