"""The audit of fused trials: a step of some trials is repeated without the array and compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.data.loader import Batch
from plait.fusion.verify.plain_run import drawing_as
from plait.sweeping.engines.verified_arrays import coarsest_rounding
from plait.training.checkpoint import EngineState
from plait.training.components import TrialInit
from plait.training.engines.train_step import step_alone
from plait.training.fused.fused_components import FusedComponents, rebuild_trial
from plait.training.worker_group import WorkerGroup
from plait.verification.audit import largest_difference
from plait.verification.compare import Difference, Noise, find_differences, measure_noise, perturb
from plait.verification.observe import Observation, unchanged_random_numbers
from plait.verification.optimizer_load import load_state_dict
from plait.verification.python_state import state_of, unchanged_state

ADVICE = (
    "train its kind one by one with --width 1, or name the modules that fusion gets wrong in an issue; "
    "verify: {on_difference: warn} goes on regardless"
)
# Weights, in bytes, of the trials that are audited at one step; each is there a few times meanwhile.
_AT_ONCE = 1 << 26


def most_at_once(array: FusedComponents) -> int:
    """How many of the array's trials may be audited at one step, by the memory that it takes."""
    shared = sum(tensor.nbytes for tensor in array.fused.shared.values())
    every = sum(parameter.nbytes for parameter in array.fused.module.parameters())
    trial_bytes = shared + (every - shared) // array.trials
    return max(1, _AT_ONCE // max(1, trial_bytes))


class AuditedTrial:
    """A copy of a trial before a step, which repeats the step without the array.

    `entry` takes the step, and draws the numbers of `stream`: the seed, the forwards before, and which
    modules run trial by trial. The workers of `group` do so together, if their gradients are summed in the
    step. `unlike` names tensors that are not compared, and `shared` those that no trial changes, which are
    not copied either.
    """

    def __init__(
        self,
        entry: TrialInit,
        stream: tuple[int, int, Mapping[str, str]],
        batch: Batch,
        factor: float,
        group: WorkerGroup,
        unlike: Collection[str] = (),
        shared: Collection[str] = (),
    ) -> None:
        started = time.perf_counter()
        self._entry, self._stream, self._factor, self._group = entry, stream, factor, group
        self._unlike, self._shared = {*unlike, *shared}, shared
        # Whether forward depends on Python attributes, whose values are unknown after the first step.
        self.uses_python_state = False
        # A forward may write into what it is given.
        content = pytree.tree_map_only(Tensor, torch.clone, batch.content)
        self._batch = replace(batch, content=content)
        components = entry.components
        self._before = {
            name: tensor.detach() if name in shared else tensor.detach().clone()
            for name, tensor in self._tensors().items()
        }
        self._optimizer = copy.deepcopy(components.optimizer.state_dict())
        self._scaler = copy.deepcopy(components.scaler.state_dict())
        self._python = state_of(components.model)
        self.seconds = time.perf_counter() - started

    @staticmethod
    def of_array(
        array: FusedComponents, slot: int, batch: Batch, factor: float, group: WorkerGroup
    ) -> AuditedTrial:
        """That of the trial in `slot` of an array of whole models."""
        fused = array.fused
        with unchanged_random_numbers():
            entry = rebuild_trial(array, slot)
        stream = int(fused.seeds[slot]), int(fused.ages[slot]), dict(fused.unfused)
        return AuditedTrial(entry, stream, batch, factor, group, shared=frozenset(fused.shared))

    def _tensors(self) -> Mapping[str, Tensor]:
        model = self._entry.components.model
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def compare(self, loss: Tensor, state: EngineState) -> tuple[float, list[Difference]]:
        """The largest difference of the step that the array took, and those beyond rounding.

        `state` is the trial's after it. They mean nothing where it `uses_python_state`.
        """
        started = time.perf_counter()
        observed = self._observed(loss, state)
        with unchanged_random_numbers(), unchanged_state({"": self._entry.components.model}):
            expected = self._take()
            differences = list(find_differences(expected, observed, Noise({})))
            if self._on_any(differences):
                noise = measure_noise(expected, self._take)
                differences = list(find_differences(expected, observed, noise))
                if self._on_any(differences) and self._entry.age:
                    self._take()
                    again = self._take(as_kept=True)
                    self.uses_python_state = self._on_any(find_differences(expected, again, noise))
        self.seconds += time.perf_counter() - started
        return largest_difference(expected, observed), differences

    def _on_any(self, differences: Sequence[Difference]) -> bool:
        """Whether there are differences on any worker of the group."""
        return any(self._group.of_all(bool(differences)))

    def _take(self, seed: int | None = None, as_kept: bool = False) -> Observation:
        """Take the step alone; with a `seed` from weights that are rounded otherwise.

        What forward keeps in Python is as before the step, or as the last one has left it.
        """
        entry, components = self._entry, self._entry.components
        with torch.no_grad():
            # Not in place: the memory of the base is that of all trials.
            for name, tensor in self._tensors().items():
                tensor.data = self._before[name] if name in self._shared else self._before[name].clone()
            if seed is not None:
                weights = list(components.model.parameters())
                for weight, moved in zip(
                    weights, perturb([w.data for w in weights], seed, coarsest_rounding(entry))
                ):
                    weight.data = moved
        load_state_dict(components.optimizer, copy.deepcopy(self._optimizer))
        components.scaler.load_state_dict(self._scaler)
        if not as_kept:  # else what a model draws or counts would pass for rounding
            self._python.restore()
        with drawing_as(components.model, *self._stream):
            loss = step_alone(entry, self._batch, self._factor, self._group)
        return self._observed(loss, components.state())

    def _observed(self, loss: Tensor, state: EngineState) -> Observation:
        # A model may compute its loss in a coarser type than its weights have.
        tensors: dict[str, Tensor | None] = {"the loss": loss.detach().to("cpu", torch.float32)}
        device = self._entry.components.device
        model = {name: t for name, t in state.model.items() if name not in self._unlike}
        tensors |= {
            f"the parameter or buffer {n}": t.detach().to(device, copy=True) for n, t in model.items()
        }
        return tensors | {
            f"the optimizer's {name}": t.detach().to(device, copy=True) for name, t in state.optimizer.items()
        }
