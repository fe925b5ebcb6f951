"""The forms of the adapters in an array: the one that all have there, and each trial's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from plait.fusion.copies import copy_of_structure
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.fusion.rules.hooks import of_fusion
from plait.fusion.trials.partial_gradients import note_trials
from plait.workloads.adapters.forms import (
    AdapterError,
    AdapterForm,
    bring_to,
    common_form,
    copy_adapted,
    form_of,
    is_adapted,
    left_out,
    misfit,
    own_parameters,
    padding_of,
)

# What a tuner of PEFT calls before it merges.
_BEFORE_MERGE = "_check_merge_allowed"


@dataclass
class ArrayForms:
    """`own` has the form of each trial; both are empty if the models had one form, or are no adapters."""

    common: AdapterForm | None = None
    own: list[AdapterForm] = field(default_factory=list)

    @property
    def _layers(self) -> Sequence[str]:
        return () if self.common is None else tuple(self.common.layers)

    @property
    def has_unlike_ranks(self) -> bool:
        """Whether adapters are padded with zeros, since others have a larger rank."""
        common = {} if self.common is None else self.common.layers
        forms = (form.layers.items() for form in self.own)
        return any(layer.rank < common[path].rank for layers in forms for path, layer in layers)

    def own_name(self, number: int, name: str) -> str | None:
        """The name that a parameter has in one trial by itself; None if that has no adapter there."""
        own = self.own[number].layers if self.own else {}
        for path in self._layers:
            if path not in own and name.startswith(f"{path}."):
                base = f"{path}.base_layer."
                return f"{path}.{name.removeprefix(base)}" if name.startswith(base) else None
        return name

    def in_own_form(self, number: int, module: nn.Module) -> nn.Module:
        """A trial's module, which has the common form, in its own."""
        return _merging_alone(bring_to(module, self.own[number]) if self.own else module)

    def check_state(self, state: Mapping[str, Any], prefix: str) -> None:
        """Raise FusionError if a saved state has adapters where trials of this array have none."""
        for number, form in enumerate(self.own):
            assert self.common is not None
            for name, axis, rank in padding_of(form, self.common):
                saved = state.get(f"{prefix}{name}", ())[number : number + 1]
                # A trial that has diverged has NaNs there.
                if len(saved) and _are_numbers(saved[0], axis, rank):
                    raise FusionError(
                        f"load_state_dict: {name!r} of trial {number} has more than rank {rank}, which this "
                        f"trial has; expected the state of an array with the same ranks and layers in the "
                        f"same order"
                    )
            for name in left_out(form, self.common):
                saved = state.get(f"{prefix}{name}", ())[number : number + 1]
                if len(saved) and not bool((saved[0] == 1).all()):
                    raise FusionError(
                        f"load_state_dict: {name!r} of trial {number} is trained, and this trial does not "
                        f"adapt that layer; expected the state of an array with the same layers in the same "
                        f"order"
                    )

    def register_hooks(self, module: nn.Module) -> None:
        """Let trials without an adapter in a layer have no gradient there, not even zeros."""
        for path in self._layers:
            for parameter in own_parameters(module.get_submodule(path)):
                parameter.register_post_accumulate_grad_hook(of_fusion(partial(self._leave_out, path)))

    def _leave_out(self, path: str, parameter: Tensor) -> None:
        if having := [number for number, form in enumerate(self.own) if path in form.layers]:
            note_trials(parameter, having)
        else:
            parameter.grad = None

    def fitted(self, model: nn.Module, array: nn.Module) -> nn.Module:
        """A model that is to join, in the form of the array, whose trials are as the module `array`.

        FusionError if the array has no room for its adapter.
        """
        if not is_adapted(model) or not is_adapted(array):
            return model
        common, form = self.common or form_of(array), form_of(model)
        if form == common:
            return model
        if why := misfit(common, form):
            raise FusionError(f"fuse: the adapter does not fit into the array: {why}")
        return bring_to(copy_of_structure(model), common)

    def replace(self, number: int, model: nn.Module, array: nn.Module, trials: int) -> None:
        """The trial `number` of as many trials has the form of `model` from now on."""
        if not is_adapted(model) or (self.common is None and form_of(model) == form_of(array)):
            return
        if self.common is None:
            self.common = form_of(array)
            self.own = [self.common] * trials
            self.register_hooks(array)
        self.own[number] = form_of(model)


def _merging_alone(model: nn.Module) -> nn.Module:
    """A trial's module that copies what merging its adapter writes to, as the other trials have it too."""
    if is_adapted(model) and hasattr(model.base_model, _BEFORE_MERGE):
        vars(model.base_model)[_BEFORE_MERGE] = Patch(_take_base, model.base_model)
    return model


def refuse_merging(module: nn.Module) -> None:
    """Let the adapters of the module of all trials not be merged: the base is that of all of them."""
    if is_adapted(module) and hasattr(module.base_model, _BEFORE_MERGE):
        vars(module.base_model)[_BEFORE_MERGE] = Patch(_refuse_merging, module)


def _refuse_merging(module: nn.Module) -> None:
    raise FusionError(
        "merge: found the module of all trials, which have one base; merge the adapter of one trial: "
        "fused.trial(0).merge_and_unload()"
    )


def _take_base(tuner: Any) -> None:
    del vars(tuner)[_BEFORE_MERGE]
    copy_adapted(tuner)
    getattr(tuner, _BEFORE_MERGE)()


def _are_numbers(tensor: Tensor, axis: int, start: int) -> bool:
    """Whether numbers other than zero are in the rows of a tensor from `start` on."""
    rows = tensor.narrow(axis, start, max(0, tensor.shape[axis] - start))
    return bool(rows.nan_to_num(0.0, 0.0, 0.0).any())


def in_one_form(models: list[nn.Module]) -> tuple[list[nn.Module], ArrayForms]:
    """PEFT models in one form, with the forms that they had; other models, and those alike, unchanged.

    The models share all tensors with the given ones but those of adapters.
    """
    if not any(map(is_adapted, models)):
        return models, ArrayForms()
    try:
        common, forms = common_form(models)
        if all(form == common for form in forms):
            return models, ArrayForms()
        return [bring_to(copy_of_structure(model), common) for model in models], ArrayForms(common, forms)
    except AdapterError as failure:
        raise FusionError(f"fuse: {failure}") from None
