"""The forms of the adapters in an array: the one that all have there, and each trial's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from plait.fusion.errors import FusionError
from plait.fusion.trials.unfused import copy_of_structure, note_trials
from plait.workloads.adapters.forms import (
    AdapterError,
    AdapterForm,
    bring_to,
    common_form,
    form_of,
    is_adapted,
    misfit,
    own_parameters,
)


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
        return bring_to(module, self.own[number]) if self.own else module

    def register_hooks(self, module: nn.Module) -> None:
        """Let trials without an adapter in a layer have no gradient there, not even zeros."""
        for path in self._layers:
            for parameter in own_parameters(module.get_submodule(path)):
                parameter.register_post_accumulate_grad_hook(partial(self._leave_out, path))

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
