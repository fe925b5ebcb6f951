"""The settings of a trial, and which trials can share an array."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from plait.core.codec import decode_over, encode
from plait.core.errors import JobError
from plait.core.names import parameters_of
from plait.core.shown import shown
from plait.fusion.optim.optimizer_kinds import KINDS
from plait.schema.settings import (
    DataSettings,
    LoraArray,
    LoraSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.sweeping.fusable import why_optimizer
from plait.sweeping.search.space import Dimension
from plait.workloads.losses import find_loss

# Sections of the job whose further keys are options, and the fields that are not.
_OPEN: Mapping[str, type] = {
    "data": DataSettings,
    "optimizer": OptimizerSettings,
    "lr_schedule": LrScheduleSettings,
    "lora": LoraSettings,
}
_TARGETS = "lora.target_modules"
# Options of adapters that train something even where all of an adapter is zeros, or adapt what target_modules
# does not name.
_MORE_THAN_ZEROS = (
    "use_dora", "lora_bias", "trainable_token_indices", "target_parameters", "layer_replication",
)  # fmt: skip
# What belongs to the run as a whole and is the same for all trials.
OF_SWEEP = (
    "name",
    "adapt",
    "run_dir",
    "device",
    "tensorboard",
    "callbacks",
    "log_every_steps",
    "parallel",
    "cluster",
    "checkpoint",
    "verify",
)
# Settings that may differ between the trials of an array; the rest must be equal.
_PER_TRIAL = ("seed", "steps", "epochs", "clip_norm", "lr_schedule", "evaluate", "early_stop", "name")


def check_key(key: str) -> None:
    """Refuse a key that must have the same value in all trials."""
    if key.partition(".")[0] in OF_SWEEP:
        raise JobError(f"--over {key}: it belongs to the sweep as a whole; set it with --set {key}=...")


def with_values(settings: TrainSettings, values: Mapping[str, Any]) -> TrainSettings:
    """`settings` with `values`, by their keys in a job file, put over them."""
    # Only sections with changed keys are encoded: there are many trials with few changed keys.
    changed = {_path(key)[0] for key in values}
    tree = {name: encode(getattr(settings, name, None)) for name in changed}
    for key, value in values.items():
        *parents, last = _path(key)
        below = tree
        for parent in parents:
            if below.get(parent) is None:
                below[parent] = {}
            # Copied, since the section is shared with other trials.
            below[parent] = dict(below[parent]) if isinstance(below[parent], dict) else below[parent]
            if not isinstance(below[parent], dict):
                raise JobError(
                    f"--over {key}: found {shown(below[parent])} as {parent!r} in the job, expected a "
                    f"section to set it in"
                )
            below = below[parent]
        # One name stands for a list of it.
        is_name = key == _TARGETS and isinstance(value, str)
        below[last] = encode([value] if is_name else value)
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        if values.get(key) is not None and other not in values:
            tree[other] = None
    return decode_over(settings, tree, "trial")


def _path(key: str) -> list[str]:
    """The path of a job-file key in the encoded settings."""
    first, *rest = key.split(".")
    if first == "model":
        return ["model", "factory"]
    if first == "model_args":
        return ["model", "args", *rest]
    section = ["model", "adapter"] if first == "lora" else [first]
    if first in _OPEN and rest[:1] and rest[0] not in {field.name for field in fields(_OPEN[first])}:
        return [*section, "options", *rest]
    return [*section, *rest]


def with_lora_array(settings: TrainSettings, dimensions: Sequence[Dimension]) -> TrainSettings:
    """The settings of a sweep whose adapters, if it has any, have one form for all values of these keys."""
    swept = {dimension.key: dimension.samples() for dimension in dimensions}
    if settings.model.adapter is None and not any(key.partition(".")[0] == "lora" for key in swept):
        return settings
    lora = settings.model.adapter or LoraSettings()
    optimizers = swept.get("optimizer.kind", [settings.optimizer.kind])
    # Others compute with whole matrices, which rows of zeros would change.
    is_padded = all(kind in KINDS and KINDS[kind].is_elementwise for kind in optimizers)
    # Values that are no ranks are refused later, where all values are.
    ranks = [r for r in swept.get("lora.r", [lora.r]) if isinstance(r, int)]
    rank = max(ranks, default=0) if is_padded else 0
    array = LoraArray(rank, any(swept.get("lora.dropout", [lora.dropout])))
    trains = any(any(swept.get(f"lora.{name}", [lora.options.get(name)])) for name in _MORE_THAN_ZEROS)
    if _TARGETS in swept and is_padded and not trains:
        values = [with_values(settings, {_TARGETS: value}).model.adapter for value in swept[_TARGETS]]
        array = replace(array, targets=tuple(each.target_modules for each in values if each is not None))
    return replace(settings, model=replace(settings.model, lora_array=array))


def is_fusable(settings: TrainSettings) -> bool:
    """Whether the fused optimizers have this one with these options; others train one by one."""
    return why_optimizer(settings) is None


def array_key(settings: TrainSettings) -> str:
    """A short text that trials have in common when one array can hold them."""
    tree = {name: value for name, value in encode(settings).items() if name not in _PER_TRIAL}
    # Batches of unlike sizes are padded, so only the rest of the data settings must be equal.
    tree["data"] = {**tree["data"], "batch_size": None}
    if settings.model.lora_array is not None:
        # Adapters may have separate data of one shape: another file, say.
        options = {name: "" if isinstance(v, str) else v for name, v in settings.data.options.items()}
        tree["data"]["options"] = encode(options)
    # Arrays hold one of each option that is no number.
    switches = {name: value for name, value in settings.optimizer.options.items() if not is_number(value)}
    ema = settings.optimizer.ema and {"evaluate": settings.optimizer.ema.evaluate}
    tree["optimizer"] = {**tree["optimizer"], "options": switches, "ema": ema}
    tree["loss_args"] = _loss_switches(settings)
    tree["model"] = _model_key(settings.model)
    text = json.dumps(tree, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _loss_switches(settings: TrainSettings) -> dict[str, Any]:
    """The loss's options that are no floats, nor numbers in a float's place; of the others the names."""
    usual = {name: p.default for name, p in parameters_of(find_loss(settings.loss)).items()}
    return {
        name: "number" if isinstance(value, float) or _stands_for(value, usual.get(name)) else [value]
        for name, value in settings.loss_args.items()
    }


def _stands_for(value: Any, usual: Any) -> bool:
    """Whether `value` is a number where a float is usual."""
    return isinstance(usual, float) and is_number(value) and not isinstance(value, (list, tuple))


def is_number(value: Any) -> bool:
    """Whether this value can differ between the trials of an array: a number, or a pair of numbers."""
    if isinstance(value, (list, tuple)):
        return all(is_number(part) for part in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _model_key(settings: ModelSettings) -> Any:
    """The model's arguments, of floats only whether they are zero: a model that asks takes another branch.

    Models whose shapes depend on a float anyway are separated after they are built.
    """
    floats = {name: value != 0.0 for name, value in settings.args.items() if isinstance(value, float)}
    others = {name: value for name, value in settings.args.items() if name not in floats}
    return [settings.factory, encode(others), floats, _lora_key(settings)]


def _lora_key(settings: ModelSettings) -> Any:
    """The adapter, without what the form that the sweep's adapters have in common leaves free."""
    if settings.adapter is None or settings.lora_array is None:
        return encode(settings.adapter)
    options = {name: value for name, value in settings.adapter.options.items() if name != "use_rslora"}
    rank = 0 if settings.lora_array.rank else settings.adapter.r
    free = replace(settings.adapter, alpha=1.0, dropout=0.0, options=options)
    if settings.lora_array.targets:
        free = replace(free, target_modules=())
    return [{**encode(free), "r": rank}, encode(settings.lora_array)]
