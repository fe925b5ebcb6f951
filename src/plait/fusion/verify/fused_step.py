"""Observations of a step of fused trials, per trial, under the names of the plain model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.per_trial import PerTrial
from plait.fusion.module import FusedModule
from plait.fusion.stacking import is_within
from plait.fusion.trials.partial_gradients import trials_without_gradient
from plait.verification import BUFFER, GRADIENT, Observation, observe_outputs

ATTRIBUTE = "the attribute "


class FusedStep:
    """Outputs, losses, gradients, buffers and Python numbers after a step of all trials."""

    def __init__(
        self,
        fused: FusedModule,
        outputs: Any,
        losses: Tensor,
        training: bool,
        first_names: Mapping[str, str],
    ) -> None:
        self._outputs = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), outputs)
        self._losses = losses.detach().clone()
        self._training = training
        self._left = _left_in(fused, training, first_names)

    def of_trial(self, trial: int, model: nn.Module) -> dict[str, Tensor | None]:
        """The observations of one trial, under the names of its plain model."""
        observation: dict[str, Tensor | None] = dict(
            observe_outputs(pytree.tree_map(lambda leaf: _of_trial(leaf, trial), self._outputs))
        )
        observation["the loss"] = self._losses[trial]
        # Parameters that no stage holds have no gradient, and buffers that no stage holds do not change.
        if self._training:
            observation |= {f"{GRADIENT}{name}": None for name, _ in model.named_parameters()}
        observation |= {f"{BUFFER}{name}": buffer for name, buffer in model.named_buffers()}
        return observation | self._left[trial]


def _of_trial(leaf: Any, trial: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[trial]
    return leaf.of(trial) if isinstance(leaf, PerTrial) else leaf


def _left_in(
    fused: FusedModule, training: bool, first_names: Mapping[str, str]
) -> list[dict[str, Tensor | None]]:
    """The gradients, buffers and Python numbers of each trial in a fused module."""
    states: list[dict[str, Tensor | None]] = [{} for _ in range(fused.trials)]
    module, per_trial, shared = fused.module, fused.per_trial_modules, fused.shared_ids()
    for name, parameter in module.named_parameters() if training else ():
        key = f"{GRADIENT}{first_names.get(name, name)}"
        absent = trials_without_gradient(parameter, fused.trials)
        # Not copied: the next step creates another gradient tensor.
        for trial, state in enumerate(states):
            state[key] = None if trial in absent or parameter.grad is None else parameter.grad[trial]
    for name, buffer in module.named_buffers():
        copied = buffer.detach().clone()
        for trial, state in enumerate(states):
            own = copied if id(buffer) in shared else copied[trial]
            state[f"{BUFFER}{first_names.get(name, name)}"] = own
    for trial, state in enumerate(states):
        for path, modules in per_trial.items():
            for name, buffer in modules.modules[trial].named_buffers(prefix=path):
                state[f"{BUFFER}{first_names.get(name, name)}"] = buffer.detach().clone()
        state |= numbers_in(module, trial, {path: m.modules[trial] for path, m in per_trial.items()})
    return states


def numbers_in(
    model: nn.Module, trial: int = 0, per_trial: Mapping[str, nn.Module] | None = None
) -> dict[str, Tensor]:
    """Numbers in attributes of modules; submodules in `per_trial` are replaced by the modules there."""
    numbers = {}
    parts = {path: part for path, part in model.named_modules() if not is_within(path, per_trial or {})}
    for path, module in (per_trial or {}).items():
        parts |= dict(module.named_modules(prefix=path))
    for path, part in parts.items():
        for name, value in vars(part).items():
            if isinstance(value, PerTrial):
                value = value.of(trial)
            if isinstance(value, (bool, int, float)) and name not in ("training", "call_super_init"):
                numbers[f"{ATTRIBUTE}{path}.{name}"] = torch.tensor(value, dtype=torch.float64)
    return numbers


def changes_in_python(seen: Sequence[Observation]) -> bool:
    """Whether Python numbers change between the first two steps."""
    if len(seen) < 2:
        return False
    first, second = ({n: v for n, v in one.items() if n.startswith(ATTRIBUTE)} for one in seen[:2])
    return any(value is not None and not torch.equal(value, second[name]) for name, value in first.items())  # type: ignore[arg-type]
