"""The profiler on whole models: do layers add up to the step, and does a stage cost what the model costs?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.pipeline.cutting.cut import cut
from plait.profiler.profile import Profile, profile_model
from plait.profiler.timing import Clock, Loss, Timed, time_whole
from plait.profiler.trace import trace
from plait.workloads.resnet import resnet50
from plait.workloads.transformer import transformer
from plait.workloads.vgg import vgg16
from plait_bench.harness import Bench, BenchClaim, Row, at_most, in_turns, number, say
from plait_bench.pictures import bars, picture


@dataclass(frozen=True)
class ProfiledCase:
    """A model and its input and classes, for a batch of a given size."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int

    def loss(self, batch: int, device: torch.device) -> Loss:
        places = self.inputs(batch).shape[1:] if self.name == "transformer" else ()
        target = torch.randint(0, self.classes, (batch, *places), device=device).flatten()
        return lambda logits: F.cross_entropy(logits.reshape(-1, self.classes), target)


CASES = (
    ProfiledCase("vgg16", vgg16, lambda batch: torch.randn(batch, 3, 224, 224), 1000),
    ProfiledCase("resnet50", resnet50, lambda batch: torch.randn(batch, 3, 224, 224), 1000),
    ProfiledCase(
        "transformer",
        lambda: transformer(vocabulary=8192, context=128),
        lambda batch: torch.randint(0, 8192, (batch, 128)),
        8192,
    ),
)


def run(
    device: str = "cpu",
    batch: int = 4,
    repeats: int = 7,
    command: str = "plait bench profiler",
    quick: bool = False,
) -> Bench:
    """Profile each model, whole steps measured in between, and time it against itself as one stage.

    `quick` takes the transformer alone, with batches of one and three repeats.
    """
    batch, repeats = (1, 3) if quick else (batch, repeats)
    rows = []
    for case in CASES[-1:] if quick else CASES:
        say(f"profiler, {case.name}")
        rows.append(_measure(case, torch.device(device), batch, repeats))
    return Bench("profiler", command, rows, _claims(rows))


def _measure(case: ProfiledCase, device: torch.device, batch: int, repeats: int) -> Row:
    torch.manual_seed(0)
    model = case.model().to(device)
    inputs = case.inputs(batch).to(device)
    loss = case.loss(batch, device)
    profile = profile_model(model, (inputs,), loss, repeats=repeats, name=case.name)
    stage, whole = _stage_against_model(model, inputs, loss, Clock(device), repeats)
    return {
        "model": case.name,
        "device": profile.device,
        "dtype": profile.dtype,
        "batch": batch,
        "threads": profile.threads,
        "layers": len(profile.graph.nodes),
        "step_s": profile.step.seconds,
        "step_spread_s": profile.step.spread_s,
        "forward_s": sum(node.forward_s for node in profile.graph.nodes),
        "backward_s": sum(node.backward_s for node in profile.graph.nodes),
        "sum_over_step": profile.coverage,
        "widest_layer_spread": _widest_spread(profile),
        "parameters_exact": profile.graph.parameter_bytes() == _parameter_bytes(model),
        "stage_s": stage.seconds,
        "stage_spread_s": stage.spread_s,
        "stage_over_model": stage.seconds / whole.seconds,
    }


def _stage_against_model(
    model: nn.Module, inputs: Tensor, loss: Loss, clock: Clock, repeats: int
) -> tuple[Timed, Timed]:
    """Seconds of a step of the model cut into a single stage, and of the model itself, taking turns."""
    traced = trace(model, (inputs,))
    stage = cut(traced, [layer.id for layer in traced.layers]).module

    def stage_loss(outputs: tuple[Tensor, ...]) -> Tensor:
        return loss(traced.rebuild_output(dict(zip(traced.outputs, outputs))))

    def seconds(module: nn.Module, loss: Loss) -> float:
        model.zero_grad()
        return time_whole(module, (inputs,), {}, loss, clock)[0]

    sides = {"stage": lambda _: seconds(stage, stage_loss), "whole": lambda _: seconds(model, loss)}
    taken = in_turns(sides, repeats)
    return Timed.of(taken["stage"]), Timed.of(taken["whole"])


def _widest_spread(profile: Profile) -> float:
    """The widest spread of any layer, as a share of the step."""
    widest = max(max(spread.forward_s, spread.backward_s) for spread in profile.spreads)
    return widest / profile.step.seconds


def _parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _claims(rows: Sequence[Row]) -> list[BenchClaim]:
    claims = []
    for row in rows:
        share = number(row, "sum_over_step")
        claims += [
            BenchClaim(f"{row['model']}: layers over whole step", share, "0.9 to 1.1", 0.9 <= share <= 1.1),
            at_most(f"{row['model']}: one stage over the model", number(row, "stage_over_model"), 1.05),
        ]
    exact = [row["parameters_exact"] is True for row in rows]
    claims.append(BenchClaim("models with exact parameter bytes", sum(exact), f"all {len(rows)}", all(exact)))
    return claims


def write_plot(bench: Bench, path: Path) -> None:
    """Seconds of a whole step, of its layers one by one, and of the model as one stage."""
    columns = {"whole step": ("step_s", "step_spread_s"), "one stage": ("stage_s", "stage_spread_s")}
    sides: list[Row] = []
    for row in bench.rows:
        layers_s = number(row, "forward_s") + number(row, "backward_s")
        sides.append({**row, "side": "sum of layers", "s": layers_s})
        for side, names in columns.items():
            seconds, range_s = (number(row, name) for name in names)
            ends = {"s_min": seconds - range_s / 2, "s_max": seconds + range_s / 2}
            sides.append({**row, "side": side, "s": seconds, **ends})
    with picture(bench, path, (8, 4)) as (axis,):
        bars(axis, sides, lambda row: str(row["model"]), "side", "s")
        axis.set(ylabel="seconds (line: interquartile range)", title="forward and backward of a batch")
