"""What workers of an elastic loop have in common: kept to take a step again, sent to workers that join."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from plait.api.data_loader import DataLoader
from plait.api.data_parallel import DataParallel
from plait.api.same_model import check_optimizer, refuse_difference, specs_of
from plait.api.step_rules import StepRules
from plait.comm.collectives import broadcast_named, broadcast_value
from plait.core.errors import InputError
from plait.data.trees import NotHandedOverError, put_together, take_apart, values_of_trials
from plait.verification.optimizer_load import load_state_dict

_PLAIN = frozenset((int, float, bool, str, type(None)))


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state that can be saved and loaded."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class _Values:
    """A dict of the user as an object with a state."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._values)

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        self._values.clear()
        self._values.update(state)


class LoopState:
    """A model, its optimizer and what else the user has registered by name."""

    def __init__(
        self, model: DataParallel, optimizer: torch.optim.Optimizer, registered: Mapping[str, Any]
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self.registered = {name: _as_stateful(name, each) for name, each in registered.items()}
        self._check_sendable()
        self._kept: tuple[list[dict[str, Any]], dict[str, Any]] = ([], {})
        named = model.module.named_parameters()
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        # The versions and addresses of the frozen parameters before the body of the loop.
        self._versions: list[tuple[int, int]] = []

    @property
    def names(self) -> list[str]:
        return sorted(self.registered)

    def check_names(self, names: Sequence[str], source: int, rank: int) -> None:
        """Refuse other names here than `names`, those of rank `source`."""
        if names != self.names:
            raise InputError(
                f"Elastic: found {_listed(self.names)} on rank {rank}, but {_listed(names)} on rank "
                f"{source}; give Elastic the same names on all workers"
            )

    def loaders(self) -> list[DataLoader]:
        return [each for each in self.registered.values() if isinstance(each, DataLoader)]

    def rate(self) -> float:
        """The sum of the learning rates, which all workers have alike."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return sum(sum(values_of_trials(rate) or [float(rate or 0.0)]) for rate in rates)

    def watch_frozen(self) -> None:
        """Note the versions of the parameters that are not trained, for `check_frozen`."""
        self._versions = [(each._version, each.data_ptr()) for _, each in self._frozen]

    def check_frozen(self) -> None:
        """Refuse a body of the loop that has changed them, as a step that is taken again does it twice."""
        for (name, each), version in zip(self._frozen, self._versions):
            if (each._version, each.data_ptr()) != version:
                raise InputError(
                    f"Elastic: the loop has changed {name}, a parameter without requires_grad, which is not "
                    "set back if a worker is lost and the step is taken again; make it a buffer of the "
                    "model, or keep the target in a registered object, such as "
                    "target=torch.optim.swa_utils.AveragedModel(...)"
                )
        self._versions = []

    def keep(self) -> None:
        """Keep what a step that is not completed may change; buffers are kept by the model."""
        self._model.forget_buffers()
        groups = [
            _copied({key: value for key, value in group.items() if key != "params"})
            for group in self._optimizer.param_groups
        ]
        self._kept = groups, {name: _copied(each.state_dict()) for name, each in self.registered.items()}

    def undo(self) -> None:
        """Go back to what was kept last."""
        groups, states = self._kept
        self._model.restore_buffers()
        for group, kept in zip(self._optimizer.param_groups, groups):
            group.update(copy.deepcopy(kept))
        for name, state in states.items():
            self.registered[name].load_state_dict(copy.deepcopy(state))

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": dict(self._model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "state": {name: each.state_dict() for name, each in self.registered.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        given, here = set(state["state"]), set(self.registered)
        if given != here:
            raise InputError(
                f"Elastic: found a state with {_listed(given)}, expected {_listed(here)}, as was given to "
                "Elastic by name"
            )
        self._model.load_state_dict(state["model"])
        load_state_dict(self._optimizer, state["optimizer"])
        for name, each in state["state"].items():
            self.registered[name].load_state_dict(each)

    def send(self, source: int, rank: int, is_current: bool) -> None:
        """Copy the state of rank `source` to the workers that are not current; all call it together."""
        specs = specs_of(self._model.module, apart=True)
        refuse_difference("Elastic", broadcast_value(specs, source), specs, (source, rank))
        state = _broadcast(self.state_dict() if rank == source else None, source, rank)
        if not is_current:
            self.load_state_dict(state)

    def _check_sendable(self) -> None:
        for name, each in self.registered.items():
            try:
                take_apart(_on_cpu(each.state_dict()), [])
            except NotHandedOverError as failure:
                found = str(failure).partition("holds ")[2].partition(", which")[0]
                raise InputError(
                    f"Elastic: the state of {name!r} holds {found}, which cannot be sent to other workers; "
                    "expected tensors, arrays, numbers and text, in tuples, lists and dicts"
                ) from None


def _copied(value: Any) -> Any:
    """As copy.deepcopy, which takes several times as long for the small states of schedulers and loaders."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: each if type(each) in _PLAIN else _copied(each) for key, each in value.items()}
    if kind is list:
        return [each if type(each) in _PLAIN else _copied(each) for each in value]
    return copy.deepcopy(value)


def _on_cpu(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def _broadcast(state: Any, source: int, rank: int) -> Any:
    """The state of rank `source`, on the CPU, sent as plain values and tensors."""
    tensors: list[Tensor] = []
    content = take_apart(_on_cpu(state), tensors)
    content = broadcast_value(content, source)
    named = broadcast_named({str(number): each for number, each in enumerate(tensors)}, source)
    received = iter(named.values())
    return state if rank == source else put_together(content, lambda dtype, shape: next(received))


def _as_stateful(name: str, value: Any) -> Stateful:
    if isinstance(value, dict):
        return _Values(value)
    if isinstance(value, torch.optim.Optimizer):
        raise InputError(
            f"Elastic: found a second optimizer, {name}, whose update would be taken twice after a loss; "
            "expected one, with param_groups for unlike settings"
        )
    if isinstance(value, Stateful) and not isinstance(value, type):
        return value
    hint = "a dict, or an object with state_dict and load_state_dict"
    if isinstance(value, torch.utils.data.DataLoader):
        hint = "a plait.DataLoader, whose batches do not depend on the workers"
    elif isinstance(value, (int, float, str)):
        hint = f"a dict that holds it, such as {name}={{'value': {value!r}}}, as workers that join change it"
    raise InputError(f"Elastic: {name} is a {type(value).__name__} without state_dict; expected {hint}")


def check_loop(model: nn.Module, optimizer: torch.optim.Optimizer, unnamed: Sequence[object]) -> None:
    """Refuse what cannot be trained by workers that come and go, and state that was given without a name."""
    if unnamed:
        names = [_usual_name(each) for each in unnamed]
        raise InputError(
            f"Elastic: found {len(unnamed)} argument{'s' if len(unnamed) > 1 else ''} after the optimizer "
            f"({', '.join(type(each).__name__ for each in unnamed)}); state is registered by name, the same "
            f"on all workers: plait.Elastic(model, optimizer, {', '.join(f'{n}={n}' for n in names)})"
        )
    if isinstance(model, DistributedDataParallel):
        raise InputError(
            "Elastic: found a DistributedDataParallel, whose workers are fixed; use plait.DataParallel(model)"
        )
    if not isinstance(model, DataParallel):
        raise InputError(
            f"Elastic: found a {type(model).__name__}, expected a plait.DataParallel, which sums the "
            "gradients of the workers: model = plait.DataParallel(model)"
        )
    if type(model.rules) is not StepRules:
        raise InputError(
            "Elastic: found a model that has an Elastic already; make one for each plait.DataParallel"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"Elastic: found a {type(optimizer).__name__}, expected the torch optimizer of the model; a "
            "scheduler and other state is given by name: scheduler=scheduler"
        )
    check_optimizer("Elastic", model, optimizer)


def _usual_name(value: object) -> str:
    name = type(value).__name__
    if "Loader" in name:
        return "loader"
    return "scheduler" if isinstance(value, torch.optim.lr_scheduler.LRScheduler) else name.lower()


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
