"""A twin of an optimizer: repeats its updates on copies, by a newly built optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from plait.verification.attributes import load_attributes, read_attributes
from plait.verification.compare import Difference, Noise, dense, find_differences
from plait.verification.observe import Observation, unchanged_random_numbers
from plait.verification.overlaps import copies

MakeOptimizer = Callable[[Sequence[Parameter]], torch.optim.Optimizer]


class OptimizerTwin:
    """Repeats the updates that `optimizer` makes from now on, with the same gradients.

    The twin is built by `make` for copies of the parameters, with the optimizer's current state; `set_lr`
    sets its learning rates before an update. `gradients` are the sums over all updates, by the `names` of
    parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        make: MakeOptimizer,
        set_lr: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._optimizer = optimizer
        self._set_lr = set_lr
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._names = {p: names[p] for p in parameters if p in names}
        # With the same strides, as torch's kernels may sum in another order otherwise.
        self._copies = dict(zip(parameters, copies(parameters)))
        self.twin = make(list(self._copies.values()))
        _copy_state(optimizer, self.twin, self._copies)
        self.updates = 0
        self.gradients: dict[str, Tensor | None] = {}
        # Parameters that forward wrote before the first update.
        self.written: dict[str, Tensor] = {}
        # A step that calls the base class's step runs the hooks twice.
        self._depth = 0
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def _before_step(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            # The optimizer's random draws are repeated.
            with unchanged_random_numbers():
                self._update()

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1

    def _update(self) -> None:
        for parameter, twin in self._copies.items():
            if self.updates == 0 and parameter in self._names and not torch.equal(parameter, twin):
                twin.data.copy_(parameter.data)
                self.written[self._names[parameter]] = twin.detach().clone()
            twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()
            if parameter in self._names:
                self._add_gradient(self._names[parameter], None if twin.grad is None else dense(twin.grad))
        for group, twin_group in zip(self._optimizer.param_groups, self.twin.param_groups):
            # Torch chooses these before each step, depending on which parameters have state.
            twin_group |= {name: group[name] for name in ("fused", "foreach") if name in group}
        self._set_lr(self.twin)
        self.twin.step()
        self.updates += 1

    def _add_gradient(self, name: str, grad: Tensor | None) -> None:
        before = self.gradients.get(name)
        if grad is None or before is None:
            # An optimizer may write to its gradients.
            added = grad if grad is None or is_torchs(self.twin) else grad.clone()
            self.gradients[name] = before if grad is None else added
        else:
            self.gradients[name] = before + grad

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def differences(self) -> Sequence[Difference]:
        """The differences between the optimizer and its twin."""
        twins: dict[Tensor, str] = {self._copies[p]: name for p, name in self._names.items()}
        expected = after_update(self.twin, twins)
        return find_differences(expected, after_update(self._optimizer, self._names), Noise({}))


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is torch's: those update each parameter independently."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _copy_state(
    source: torch.optim.Optimizer, target: torch.optim.Optimizer, twins: Mapping[Tensor, Parameter]
) -> None:
    """Copy per-parameter state, groups and attributes from `source` to `target`."""
    # State may refer to its parameter, or to another one.
    known: dict[int, Any] = {id(parameter): twin for parameter, twin in twins.items()}
    for group, target_group in zip(source.param_groups, target.param_groups, strict=True):
        target_group |= {
            name: copy.deepcopy(value, known) for name, value in group.items() if name != "params"
        }
    for parameter, state in source.state.items():
        if parameter in twins:
            target.state[twins[parameter]] = {key: _copied(value, known) for key, value in state.items()}
    load_attributes({"": target}, read_attributes({"": source}).values)
    # A wrapper, such as Lookahead, has the state of both.
    for name, inner in vars(source).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not source:
            _copy_state(inner, vars(target)[name], twins)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    # Most of it is tensors, for which deepcopy is slow.
    if type(value) is Tensor and id(value) not in known and value._base is None:
        known[id(value)] = value.detach().clone()
    return copy.deepcopy(value, known)


def after_update(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Observation:
    """Parameters, state and group values after an update."""
    observation: dict[str, Tensor | None] = {}
    for parameter, name in names.items():
        observation[f"the parameter {name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (Tensor, int, float)):
                observation[f"the optimizer's {key} of {name}"] = torch.as_tensor(value)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            # Booleans select how torch computes, not what.
            if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                observation[f"the optimizer's {key} of group {number}"] = torch.as_tensor(value)
    return observation
