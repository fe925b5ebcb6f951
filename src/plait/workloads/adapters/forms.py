"""The forms of PEFT adapters: models with unlike ranks, dropouts and adapted layers in one form, and back.

A rank is raised by rows and columns of zeros, a missing adapter is one of zeros. Products with them are zero,
and so are the gradients of both: each is a product with the other. So these zeros stay zeros under every
optimizer that updates element by element, and an adapter computes and trains as in its own form.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.core.errors import InputError

_LORA_TENSORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
# What a configuration of prompt learning says about how it began, or was loaded.
_OF_START = frozenset(
    (
        "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs", "inference_mode", "revision",
        "auto_mapping", "peft_version", "base_model_name_or_path", "encoder_dropout",
    )
)  # fmt: skip


class AdapterError(InputError):
    """Adapters that cannot have one form, or settings of an adapter that cannot be."""


@dataclass(frozen=True)
class LayerForm:
    """The form of the adapter of one layer: `kind` is lora or ia3; `drops` whether it has a dropout."""

    kind: str
    rank: int = 0
    alpha: float = 0.0
    is_scaled_by_root: bool = False
    drops: bool = False
    is_feedforward: bool = False
    # Of a LoRA; a base of packed integers does not say it.
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class AdapterForm:
    """The form of a PEFT model: its configurations by adapter, and its adapted layers by path."""

    configs: Mapping[str, Any]
    layers: Mapping[str, LayerForm]
    targets: tuple[str, ...]

    @property
    def adapter(self) -> str:
        return next(iter(self.configs))

    @property
    def config(self) -> Any:
        return self.configs[self.adapter]

    @property
    def kind(self) -> str:
        """The method in words: LORA, DORA, IA3, PROMPT_TUNING, ..."""
        name = str(getattr(self.config.peft_type, "value", self.config.peft_type))
        return "DORA" if getattr(self.config, "use_dora", False) else name


def is_adapted(model: Any) -> bool:
    """Whether this is a model of the PEFT library."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def form_of(model: nn.Module) -> AdapterForm:
    """The form of a PEFT model."""
    configs = copy.deepcopy(dict(model.peft_config))  # type: ignore[arg-type]
    adapter = next(iter(configs))
    layers = {path: _layer_form(layer, adapter) for path, layer in _adapted_layers(model)}
    targets = tuple(getattr(model.base_model, "targeted_module_names", ()))
    return AdapterForm(configs, layers, targets)


def common_form(models: Sequence[nn.Module]) -> tuple[AdapterForm, list[AdapterForm]]:
    """The form that can hold all of these models, and the form of each.

    AdapterError for models that are not adapters of one kind on one base.
    """
    for number, model in enumerate(models):
        if not is_adapted(model):
            raise AdapterError(
                f"model {number} is a {type(model).__name__} and others are PEFT models, expected all of "
                f"one kind; wrap it with peft.get_peft_model, or fuse it with others of its kind"
            )
    _refuse_common_layers(models)
    forms = [form_of(model) for model in models]
    first = forms[0]
    for number, form in enumerate(forms[1:], 1):
        _check_same_kind(first, form, number)
    _check_bases(models, forms)
    _check_active(models)
    if all(form == first for form in forms[1:]):
        return first, forms
    return _joined(forms), forms


def misfit(common: AdapterForm, form: AdapterForm) -> str:
    """Why a model of the form `form` cannot be brought to the form `common`; empty if it can."""
    if form.kind != common.kind or list(form.configs) != list(common.configs):
        return f"it is {form.kind} {list(form.configs)}, expected {common.kind} {list(common.configs)}"
    for path, layer in form.layers.items():
        room = common.layers.get(path)
        if room is None:
            return f"the array has no adapter of {path!r}"
        if layer.rank > room.rank:
            return f"its rank at {path!r} is {layer.rank}, expected {room.rank} or less"
        if layer.drops and not room.drops:
            return f"it has a dropout at {path!r}, and the array has none"
        if (layer.kind, layer.is_feedforward) != (room.kind, room.is_feedforward):
            return f"its adapter of {path!r} is {layer}, expected {room}"
    return ""


@torch.no_grad()
def bring_to(model: nn.Module, form: AdapterForm) -> nn.Module:
    """Change a PEFT model to this form, in place: larger by zeros, or smaller by leaving zeros out.

    Tensors that change their shape become new parameters.
    """
    parts = dict(model.named_modules())
    for path, layer in list(_adapted_layers(model)):
        if path not in form.layers:
            _set_submodule(model, path, layer.base_layer)
    for path, wanted in form.layers.items():
        if not _is_adapted_layer(parts.get(path)):
            _add_adapter(model, path, parts[path], form)
        layer = model.get_submodule(path)
        if wanted.kind == "lora":
            _fit_lora(layer, form.adapter, wanted)
    configs = copy.deepcopy(dict(form.configs))
    for part in model.modules():
        for name in ("peft_config", "_peft_config"):
            if vars(part).get(name) is not None:
                vars(part)[name] = configs
        if "targeted_module_names" in vars(part):
            part.targeted_module_names = list(form.targets)  # type: ignore[assignment]
    return model


def own_parameters(layer: Any) -> list[nn.Parameter]:
    """The parameters of a layer's adapter that would train even if they began as zeros."""
    adapter = next(iter(getattr(layer, "r", {})), "")
    zeros = {id(tensor) for tensor in _rank_tensors(layer, adapter)} if hasattr(layer, "lora_A") else set()
    return [parameter for parameter in _own_tensors(layer) if id(parameter) not in zeros]


def copy_adapted(tuner: Any) -> None:
    """Copy the weights that a tuner of PEFT writes to when it merges its adapter."""
    for _, layer in _adapted_layers(tuner):
        for parameter in layer.base_layer.parameters():
            parameter.data = parameter.data.clone()


def left_out(form: AdapterForm, common: AdapterForm) -> list[str]:
    """The scales of `common` that are ones for `form`, which does not adapt their layers by IA3."""
    return [
        f"{path}.ia3_l.{form.adapter}"
        for path, layer in common.layers.items()
        if layer.kind == "ia3" and path not in form.layers
    ]


def padding_of(form: AdapterForm, common: AdapterForm) -> Iterator[tuple[str, int, int]]:
    """The tensors of `common` that are padded for `form`: name, axis, and where the padding begins."""
    for path, layer in common.layers.items():
        rank = form.layers[path].rank if path in form.layers else 0
        for name, axis in zip(_LORA_TENSORS, (0, 1, 0, 1)) if rank < layer.rank else ():
            end = "" if "embedding" in name else ".weight"
            yield f"{path}.{name}.{form.adapter}{end}", axis, rank


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, part) for path, part in model.named_modules() if _is_adapted_layer(part))


def _is_adapted_layer(part: Any) -> bool:
    tuners = sys.modules["peft.tuners.tuners_utils"]
    return isinstance(part, tuners.BaseTunerLayer)


def _layer_form(layer: Any, adapter: str) -> LayerForm:
    if hasattr(layer, "ia3_l"):
        return LayerForm("ia3", is_feedforward=bool(layer.is_feedforward))
    if not _is_lora(layer, adapter):
        return LayerForm(type(layer).__qualname__)
    if adapter not in layer.r:
        raise AdapterError(
            f"a layer of {type(layer).__qualname__} has the adapters {list(layer.r)} and not {adapter!r}, "
            f"the model's first: of several named adapters, add the one of all layers first; if one base was "
            f"wrapped twice, wrap a copy for each: get_peft_model(copy.deepcopy(base), config)"
        )
    return LayerForm(
        "lora",
        layer.r[adapter],
        layer.lora_alpha[adapter],
        bool(layer.use_rslora.get(adapter, False)),
        isinstance(layer.lora_dropout[adapter], nn.Dropout),
        dtype=next(_rank_tensors(layer, adapter)).dtype,
    )


def _is_lora(layer: Any, adapter: str) -> bool:
    """Whether this is LoRA or DoRA, whose rank can be raised by zeros; others compute something else."""
    peft = sys.modules["peft"]
    lora = peft.tuners.lora
    if not isinstance(layer, lora.LoraLayer) or isinstance(layer, peft.tuners.adalora.AdaLoraLayer):
        return False
    # An adapter of a parameter, such as that of all experts, has several matrices in one.
    if isinstance(layer, lora.layer.ParamWrapper):
        return False
    return layer.lora_variant.get(adapter) is None or layer.use_dora.get(adapter, False)


def _refuse_common_layers(models: Sequence[nn.Module]) -> None:
    """Refuse models made by wrapping one base object several times: the last adapter replaces the others."""
    owners: dict[int, int] = {}
    for number, model in enumerate(models):
        for path, layer in _adapted_layers(model):
            other = owners.setdefault(id(layer), number)
            if other != number:
                raise AdapterError(
                    f"models {other} and {number} are adapters of one base object: {path!r} is the same "
                    f"module in both, since get_peft_model changes the model that it is given and the last "
                    f"call replaces the adapters of the ones before; wrap a copy for each: "
                    f"get_peft_model(copy.deepcopy(base), config)"
                )


def _check_same_kind(first: AdapterForm, form: AdapterForm, number: int) -> None:
    if form.kind != first.kind:
        raise AdapterError(
            f"model 0 is an adapter by {first.kind} and model {number} one by {form.kind}; fuse the adapters "
            f"of each method by themselves"
        )
    if list(form.configs) != list(first.configs):
        raise AdapterError(
            f"the adapters are called {list(first.configs)} in model 0 and {list(form.configs)} in model "
            f"{number}; give them one name (adapter_name=...)"
        )
    for name in ("tokenizer_name_or_path", "modules_to_save", "bias", "trainable_token_indices"):
        values = [getattr(one.config, name, None) for one in (first, form)]
        if values[0] != values[1]:
            raise AdapterError(
                f"{name} is {values[0]!r} in model 0 and {values[1]!r} in model {number}, expected the same; "
                f"fuse those of each value by themselves"
            )


def _check_active(models: Sequence[nn.Module]) -> None:
    """Refuse models of which others of their adapters are in use."""
    in_use = [
        [[] if layer.disable_adapters else list(layer.active_adapters) for _, layer in _adapted_layers(model)]
        for model in models
    ]
    actives = [max(layers, key=len, default=[]) for layers in in_use]
    for number, active in enumerate(actives):
        if active != actives[0]:
            raise AdapterError(
                f"the adapters in use are {actives[0]} in model 0 and {active} in model {number}, expected "
                f"the same; call set_adapter, or enable_adapter_layers, on each model"
            )


def _check_bases(models: Sequence[nn.Module], forms: Sequence[AdapterForm]) -> None:
    """Refuse adapters of different bases."""
    advice = "expected adapters of one base, with one vocabulary; fuse those of each base by themselves"
    shapes = [_base_shapes(model) for model in models]
    for number, (form, own) in enumerate(zip(forms, shapes)):
        names = [one.config.base_model_name_or_path for one in (forms[0], form)]
        if all(names) and names[0] != names[1]:
            raise AdapterError(f"model 0 adapts {names[0]!r} and model {number} {names[1]!r}; {advice}")
        if own != shapes[0]:
            name = next(n for n in [*shapes[0], *own] if shapes[0].get(n) != own.get(n))
            raise AdapterError(
                f"the bases of models 0 and {number} differ: {name!r} is {shapes[0].get(name)} in model 0 "
                f"and {own.get(name)} in model {number}; {advice}"
            )


def _base_shapes(model: nn.Module) -> dict[str, Any]:
    """The shapes of the frozen tensors, by their names in the base."""
    own = {id(tensor) for _, layer in _adapted_layers(model) for tensor in _own_tensors(layer)}
    own |= {id(tensor) for tensor in getattr(model, "prompt_encoder", nn.Module()).parameters()}
    return {
        name.replace(".base_layer", "").removeprefix("base_model.model."): tuple(tensor.shape)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if id(tensor) not in own
    }


def _own_tensors(layer: Any) -> Iterator[nn.Parameter]:
    """The tensors of a layer's adapter."""
    inside = {id(tensor) for tensor in layer.base_layer.parameters()}
    return (tensor for tensor in layer.parameters() if id(tensor) not in inside)


def _joined(forms: Sequence[AdapterForm]) -> AdapterForm:
    """A form that holds all of `forms`."""
    first = forms[0]
    layers: dict[str, LayerForm] = {}
    # In the order of the first model that has them all, or of appearance.
    for form in sorted(forms, key=lambda form: -len(form.layers)):
        for path, layer in form.layers.items():
            layers[path] = _larger(path, layers[path], layer) if path in layers else layer
    is_other = any(one.kind not in ("lora", "ia3", "TrainableTokensLayer") for one in layers.values())
    if is_other or first.config.is_prompt_learning or getattr(first.config, "ensure_weight_tying", False):
        for number, form in enumerate(forms[1:], 1):
            _check_same_settings(first, form, number)
        return first
    if len(first.configs) > 1:
        raise AdapterError(
            f"the models have the adapters {list(first.configs)} with unlike settings, expected one adapter "
            f"each"
        )
    if getattr(first.config, "bias", "none") == "lora_only" and any(
        form.layers.keys() != layers.keys() for form in forms
    ):
        raise AdapterError(
            "the adapters have bias='lora_only' and unlike target_modules, so that they train the biases of "
            "other layers; fuse those of the same layers by themselves, or use bias='none' or 'all'"
        )
    drops = any(layer.drops for layer in layers.values())
    if drops:
        layers = {path: replace(layer, drops=True) for path, layer in layers.items()}
    targets = tuple(dict.fromkeys(target for form in forms for target in form.targets))
    config = copy.deepcopy(first.config)
    config.target_modules = set(targets)
    if hasattr(config, "feedforward_modules"):
        config.feedforward_modules = {key_of(path) for path, layer in layers.items() if layer.is_feedforward}
    if hasattr(config, "lora_dropout"):
        config.rank_pattern, config.alpha_pattern = {}, {}
        config.r = max(layer.rank for layer in layers.values())
        config.lora_dropout = max(form.config.lora_dropout for form in forms)
    return AdapterForm({first.adapter: config}, layers, targets)


def _larger(path: str, one: LayerForm, other: LayerForm) -> LayerForm:
    if one.kind != other.kind or one.is_feedforward != other.is_feedforward:
        raise AdapterError(f"the adapters of {path!r} differ in more than rank: {one} and {other}")
    return replace(one, rank=max(one.rank, other.rank), drops=one.drops or other.drops)


def _check_same_settings(first: AdapterForm, form: AdapterForm, number: int) -> None:
    values, others = (vars(one.config) for one in (first, form))
    for name in values:
        if name not in _OF_START and values[name] != others.get(name):
            raise AdapterError(
                f"{name} is {values[name]!r} in model 0 and {others.get(name)!r} in model {number}; fused "
                f"adapters by {first.kind} have the same; fuse those of each value by themselves"
            )


def _add_adapter(model: nn.Module, path: str, target: nn.Module, form: AdapterForm) -> None:
    """Add an adapter that changes nothing to a layer, as PEFT makes it for the model's configuration."""
    parent, _, name = path.rpartition(".")
    config = copy.deepcopy(form.config)
    tuner: Any = model.base_model
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    with torch.random.fork_rng(), torch.enable_grad():
        tuner._create_and_replace(
            config, form.adapter, target, name, model.get_submodule(parent), current_key=key_of(path)
        )
    layer: Any = model.get_submodule(path)
    layer.train(target.training)
    layer.set_adapter(list(tuner.active_adapters))
    if form.layers[path].kind == "lora":
        for tensor in _rank_tensors(layer, form.adapter):
            tensor.data = torch.zeros_like(tensor, dtype=form.layers[path].dtype)
        layer.lora_dropout[form.adapter] = nn.Identity()


def _fit_lora(layer: Any, adapter: str, wanted: LayerForm) -> None:
    """Change the rank of a LoRA layer, and what says so."""
    for name, axis in zip(_LORA_TENSORS, (0, 1, 0, 1)):
        holder = getattr(layer, name)
        if adapter not in holder:
            continue
        part: Any = holder[adapter]
        if isinstance(part, nn.Module):
            part.weight = _resized(cast("nn.Parameter", part.weight), axis, wanted.rank)
            sizes = ("out_features", "out_channels") if axis == 0 else ("in_features", "in_channels")
            for size in sizes:
                if hasattr(part, size):
                    setattr(part, size, wanted.rank)
        else:
            holder[adapter] = _resized(part, axis, wanted.rank)
    layer.r[adapter], layer.lora_alpha[adapter] = wanted.rank, wanted.alpha
    layer.use_rslora[adapter] = wanted.is_scaled_by_root
    dropout = layer.lora_dropout[adapter]
    if wanted.drops != isinstance(dropout, nn.Dropout):
        made = nn.Dropout(0.0) if wanted.drops else nn.Identity()
        layer.lora_dropout[adapter] = made.train(layer.training)


def _rank_tensors(layer: Any, adapter: str) -> Iterator[Tensor]:
    for name in _LORA_TENSORS:
        holder = getattr(layer, name)
        if adapter in holder:
            part: Any = holder[adapter]
            yield getattr(part, "weight", part)


def _resized(tensor: nn.Parameter, axis: int, size: int) -> nn.Parameter:
    """`tensor` with `size` rows along an axis: zeros are appended, or the last rows left out."""
    if tensor.shape[axis] == size:
        return tensor
    kept = min(size, tensor.shape[axis])
    shape = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
    made = tensor.new_zeros(shape)
    made.narrow(axis, 0, kept).copy_(tensor.narrow(axis, 0, kept))
    return nn.Parameter(made, tensor.requires_grad)


def _set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def key_of(path: str) -> str:
    """The path of a layer in the base."""
    return path.removeprefix("base_model.model.")
