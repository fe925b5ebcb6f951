"""The LoRA adapter that a job names, on its model."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn

from plait.core.errors import JobError
from plait.core.names import check_extra, did_you_mean
from plait.core.shown import listed
from plait.schema.settings import LoraArray, LoraSettings
from plait.workloads.adapters.forms import AdapterForm, LayerForm, bring_to, form_of, key_of

# Names of the section for options of PEFT.
_OWN = {"lora_alpha": "alpha", "lora_dropout": "dropout", "rank": "r", "peft_type": "", "r": "r"}


def check_lora(settings: LoraSettings) -> Any:
    """PEFT's configuration of the adapter; JobError for options that it does not have."""
    check_extra("peft", "lora", JobError)
    import peft

    known = {field.name for field in fields(peft.LoraConfig)} - set(_OWN)
    for name in settings.options:
        if name not in known:
            hint = f"; it is written lora.{_OWN[name]}" if _OWN.get(name) else did_you_mean(name, known)
            raise JobError(f"lora.{name}: LoraConfig of PEFT has no such setting{hint}")
    targets: Any = list(settings.target_modules) or None
    if targets == ["all-linear"]:
        targets = "all-linear"
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    try:
        return peft.LoraConfig(
            r=settings.r,
            lora_alpha=alpha,
            lora_dropout=settings.dropout,
            target_modules=targets,
            **settings.options,
        )
    except (TypeError, ValueError) as failure:
        raise JobError(f"lora: PEFT refuses these settings: {failure}") from None


def add_lora(model: nn.Module, settings: LoraSettings, array: LoraArray | None = None) -> nn.Module:
    """`model`, frozen, with a new adapter; for an array of a sweep, in the form that is common to it."""
    config = check_lora(settings)
    import peft

    _check_targets(model, settings)
    try:
        others = [] if array is None else _adapted_by(model, settings, array.targets)
        made: nn.Module = peft.get_peft_model(model, config)
    except ValueError as failure:
        raise JobError(f"lora: {failure}") from None
    for path, part in made.named_modules():
        if not hasattr(part, "lora_A") or not getattr(part, "r", None):
            continue
        width = min(part.in_features, part.out_features)
        if settings.r > width:
            raise JobError(
                f"lora.r: found {settings.r}, but {path.removeprefix('base_model.model.')} is "
                f"{part.in_features} x {part.out_features}; expected at most {width}"
            )
    return made if array is None else bring_to(made, _form_in(array, form_of(made), others))


def _check_targets(model: nn.Module, settings: LoraSettings) -> None:
    """Refuse names of layers that the model does not have."""
    paths = [path for path, _ in model.named_modules() if path]
    ends = sorted({path.rpartition(".")[2] for path in paths})
    for target in settings.target_modules:
        if target != "all-linear" and not any(f".{path}".endswith(f".{target}") for path in paths):
            close = difflib.get_close_matches(target, ends, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its layers end in {listed(ends, 300)}"
            raise JobError(f"lora.target_modules: the model has no layer {target!r}; {hint}")


def _adapted_by(model: nn.Module, settings: LoraSettings, targets: Sequence[tuple[str, ...]]) -> list[str]:
    """The layers of a model that adapters with any of these `target_modules` adapt, in the model's order."""
    from peft.tuners import tuners_utils
    from peft.tuners.lora import LoraModel

    keys, names = [key for key, _ in model.named_modules()], set()
    for each in targets:
        own = replace(settings, target_modules=each)
        try:
            _check_targets(model, own)
            checked = check_lora(own)
        except JobError:  # of the trials that name them, which fail by themselves
            continue
        prepared = LoraModel._prepare_adapter_config(LoraModel, checked, LoraModel.get_model_config(model))
        config = tuners_utils._maybe_include_all_linear_layers(prepared, model)
        names |= {key for key in keys if tuners_utils.check_target_module_exists(config, key)}
    return [f"base_model.model.{key}" for key in keys if key in names]


def _form_in(array: LoraArray, form: AdapterForm, others: Sequence[str]) -> AdapterForm:
    """The form in an array: what the scale comes from is the same for all, the scale itself is a number."""
    config = copy.deepcopy(form.config)
    config.r, config.lora_alpha, config.lora_dropout = array.rank or config.r, 1, 0.0
    config.use_rslora = False
    layers = {
        path: replace(
            layer, rank=max(array.rank, layer.rank), alpha=1, is_scaled_by_root=False, drops=array.drops
        )
        for path, layer in form.layers.items()
    }
    if not others:
        return replace(form, configs={form.adapter: config}, layers=layers)
    added = LayerForm("lora", config.r, 1, drops=array.drops)
    targets = tuple(key_of(path) for path in others)
    config.target_modules = set(targets)
    # What is adapted without being named, such as tokens, stays.
    every = {path: layers.get(path, added) for path in others} | layers
    return AdapterForm({form.adapter: config}, every, targets)
