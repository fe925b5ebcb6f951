"""What defines an optimizer of fused trials: every coefficient has one value per trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.fusion.optim.step_clock import StepClock

# Hyperparameters or coefficients by name, each with one value per trial.
Vectors = Mapping[str, Tensor]
# A parameter, its gradient, and its states by name.
WithState = tuple[Tensor, Tensor, dict[str, Tensor]]
# Options that are the same for all trials, as one formula computes them all.
Common = Mapping[str, Any]


def _zeros(h: Vectors, parameter: Tensor, name: str) -> Tensor:
    return torch.zeros_like(parameter, requires_grad=False)


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer: hyperparameters with torch's defaults, states of a parameter, and the formulas.

    `states(numbers, common, dim)` are the names of a parameter's states; it has `dim` axes in each trial.
    `coefficients(h, clock)` takes the hyperparameters and the step counts of each trial and returns the
    coefficients `c` of `update(p, g, state, c, common)`, which changes a parameter and its states in place.
    """

    torch_class: type[torch.optim.Optimizer]
    hyperparameters: Mapping[str, float | None]
    states: Callable[[Mapping[str, Sequence[float]], Common, int], list[str]]
    coefficients: Callable[[Vectors, StepClock], dict[str, Tensor]]
    update: Callable[[Tensor, Tensor, dict[str, Tensor], Vectors, Common], None]
    common: Common = field(default_factory=dict)
    # Hyperparameters that torch has as one tuple, such as betas.
    tuples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # What None means for a hyperparameter, for parameters of a type.
    unset: Mapping[str, Callable[[torch.dtype], float]] = field(default_factory=dict)
    # Whether a parameter has state from its first step on, or from the first with momentum.
    counts_steps: bool = True
    # Whether torch's state has a step count.
    has_step: bool = True
    # If a trial is skipped, these coefficients are 1 and all others 0.
    keeping: frozenset[str] = frozenset()
    # Whether each element is updated by itself, so that rows of zeros change nothing for the others.
    is_elementwise: bool = True
    # A parameter's first state, by name.
    first_state: Callable[[Vectors, Tensor, str], Tensor] = _zeros
    # What of a parameter the optimizer cannot update, if anything.
    objection: Callable[[Tensor], str | None] = lambda parameter: None
    # Torch's fused kernel for all parameters of one trial, if there is one, and the lists of tensors that it
    # takes after those of parameters and gradients; the hyperparameters and `common` are its options.
    kernel: Callable[..., None] | None = None
    kernel_states: tuple[str, ...] = ()
    # Same as `update` for several parameters, by one of our kernels in one pass over all trials; on a GPU, in
    # float32. The coefficients are one tensor, with a row for each in the order of `coefficients`.
    one_pass: Callable[[Iterable[WithState], Tensor, Common], None] | None = None

    def torch_names(self) -> dict[str, Any]:
        """The hyperparameters under torch's names, with torch's defaults."""
        return self.in_tuples(self.hyperparameters)

    def in_tuples(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Hyperparameters under torch's names."""
        parts = [name for names in self.tuples.values() for name in names]
        single = {name: value for name, value in numbers.items() if name not in parts}
        return single | {name: tuple(numbers[part] for part in of) for name, of in self.tuples.items()}
