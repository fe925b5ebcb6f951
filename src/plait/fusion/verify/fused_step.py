"""What a step of fused trials left: of each trial, under the names that its plain model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.module import FusedModule
from plait.fusion.trials.per_trial import PerTrial
from plait.fusion.trials.unfused import trials_without_gradient
from plait.verification import BUFFER, GRADIENT, Observation, observe_outputs

ATTRIBUTE = "the attribute "


class FusedStep:
    """What a step of all trials left: outputs, losses, and of each module gradients, buffers and numbers."""

    def __init__(
        self,
        fused: Sequence[FusedModule],
        outputs: Any,
        losses: Tensor,
        training: bool,
        first_names: Mapping[str, str],
    ) -> None:
        self._outputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), outputs)
        self._losses = losses.detach().clone()
        self._training = training
        self._parts = [_left_in(one, training, first_names) for one in fused]

    def of_trial(self, trial: int, model: nn.Module) -> dict[str, Tensor | None]:
        """What one trial did, under the names that its plain model has."""
        found: dict[str, Tensor | None] = dict(
            observe_outputs(pytree.tree_map(lambda leaf: _of_trial(leaf, trial), self._outputs))
        )
        found["the loss"] = self._losses[trial]
        # Of what no stage holds there is no gradient, and its buffers stay.
        if self._training:
            found |= {f"{GRADIENT}{name}": None for name, _ in model.named_parameters()}
        found |= {f"{BUFFER}{name}": buffer for name, buffer in model.named_buffers()}
        for part in self._parts:
            found |= part[trial]
        return found


def _of_trial(leaf: Any, trial: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[trial]
    return leaf.of(trial) if isinstance(leaf, PerTrial) else leaf


def _left_in(
    fused: FusedModule, training: bool, first_names: Mapping[str, str]
) -> list[dict[str, Tensor | None]]:
    """Of each trial, the gradients, buffers and numbers that a step left in a fused module."""
    found: list[dict[str, Tensor | None]] = [{} for _ in range(fused.trials)]
    module, own = fused.module, fused.own_modules()
    for name, parameter in module.named_parameters() if training else ():
        key = f"{GRADIENT}{first_names.get(name, name)}"
        absent = trials_without_gradient(parameter, fused.trials)
        # The step's own tensor: the next step begins another.
        for trial, state in enumerate(found):
            state[key] = None if trial in absent or parameter.grad is None else parameter.grad[trial]
    for name, buffer in module.named_buffers():
        copied = buffer.detach().clone()
        for trial, state in enumerate(found):
            state[f"{BUFFER}{first_names.get(name, name)}"] = copied[trial]
    for trial, state in enumerate(found):
        for path, modules in own.items():
            for name, buffer in modules.modules[trial].named_buffers(prefix=path):
                state[f"{BUFFER}{first_names.get(name, name)}"] = buffer.detach().clone()
        state |= numbers_in(module, trial, {path: m.modules[trial] for path, m in own.items()})
    return found


def numbers_in(
    model: nn.Module, trial: int = 0, own: Mapping[str, nn.Module] | None = None
) -> dict[str, Tensor]:
    """Numbers that modules keep in attributes; those of submodules in `own` are looked up there."""
    found = {}
    parts = {path: part for path, part in model.named_modules() if not is_within(path, own or {})}
    for path, module in (own or {}).items():
        parts |= dict(module.named_modules(prefix=path))
    for path, part in parts.items():
        for name, value in vars(part).items():
            if isinstance(value, PerTrial):
                value = value.of(trial)
            if isinstance(value, (bool, int, float)) and name not in ("training", "call_super_init"):
                found[f"{ATTRIBUTE}{path}.{name}"] = torch.tensor(value, dtype=torch.float64)
    return found


def changes_in_python(seen: Sequence[Observation]) -> bool:
    """Whether numbers kept in Python change from one training step to the next."""
    if len(seen) < 2:
        return False
    first, second = ({n: v for n, v in one.items() if n.startswith(ATTRIBUTE)} for one in seen[:2])
    return any(value is not None and not torch.equal(value, second[name]) for name, value in first.items())  # type: ignore[arg-type]


def is_within(name: str, others: Mapping[str, Any]) -> bool:
    return any(name == other or name.startswith(f"{other}.") or not other for other in others)
