"""The commands of a worker group's leader to its followers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from plait.core.codec import decode, encode
from plait.fusion.verify import Verdict
from plait.pipeline.named_state import Tensors
from plait.schema.settings import TrainSettings
from plait.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Newcomer:
    """A trial that joins: its settings, and its state where it does not begin."""

    settings: TrainSettings
    state: Checkpoint | None


@dataclass(frozen=True)
class BeginCommand:
    """Make an array of these trials; `stages` are the layers of each stage where the plan's were changed."""

    entering: tuple[Newcomer, ...]
    fused: bool
    verdict: Verdict = field(default_factory=Verdict)
    stages: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class ChangeCommand:
    """Let the trials at these places leave and others enter."""

    leaving: tuple[int, ...]
    entering: tuple[Newcomer, ...]


@dataclass(frozen=True)
class StepCommand:
    """Take a step with these factors on the trials' learning rates."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class EvaluateCommand:
    """Evaluate your share of the test split for the trials at these places."""

    places: tuple[int, ...]


@dataclass(frozen=True)
class CollectCommand:
    """Send the leader the state of the trial at this place."""

    place: int


@dataclass(frozen=True)
class DissolveCommand:
    """Release the array."""


@dataclass(frozen=True)
class EndCommand:
    """There is nothing left to do."""


Command = (
    BeginCommand
    | ChangeCommand
    | StepCommand
    | EvaluateCommand
    | CollectCommand
    | DissolveCommand
    | EndCommand
)


def to_message(command: Command) -> tuple[dict[str, Any], Tensors]:
    """The command as plain values and named tensors."""
    tensors: Tensors = {}
    fields = {name: value for name, value in vars(command).items() if name != "entering"}
    entering = []
    for number, one in enumerate(getattr(command, "entering", ())):
        state = one.state
        if state is not None:
            tensors |= {f"{number}/model/{name}": value for name, value in state.model.items()}
            tensors |= {f"{number}/optimizer/{name}": value for name, value in state.optimizer.items()}
        rest = None if state is None else [state.step, dict(state.progress)]
        entering.append([encode(one.settings), rest])
    return {"command": type(command).__name__, "fields": encode(fields), "entering": entering}, tensors


def from_message(value: Mapping[str, Any], tensors: Tensors) -> Command:
    """The command that `to_message` made these of."""
    kind = next(each for each in get_args(Command) if each.__name__ == value["command"])
    if not value["entering"] and kind not in (BeginCommand, ChangeCommand):
        made: Command = decode(kind, value["fields"])
        return made
    entering = tuple(
        Newcomer(decode(TrainSettings, settings, "settings"), _state(number, rest, tensors))
        for number, (settings, rest) in enumerate(value["entering"])
    )
    fields = value["fields"]
    if kind is BeginCommand:
        stages = tuple(tuple(layers) for layers in fields["stages"])
        return BeginCommand(entering, fields["fused"], decode(Verdict, fields["verdict"], "verdict"), stages)
    return ChangeCommand(tuple(fields["leaving"]), entering)


def _state(number: int, rest: list[Any] | None, tensors: Tensors) -> Checkpoint | None:
    if rest is None:
        return None
    step, progress = rest
    model, optimizer = (
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in (f"{number}/model/", f"{number}/optimizer/")
    )
    return Checkpoint(step, model, optimizer, progress)
