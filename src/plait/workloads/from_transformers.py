"""Models of the transformers library, made from a configuration; they compute their own loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.core.errors import JobError
from plait.core.files import expand_path
from plait.core.names import check_extra, did_you_mean

# What is read of a file of weights to know it again: 4 MB.
_SAMPLES, _SAMPLED_BYTES = 256, 1 << 14


def from_config(
    architecture: str, config: Mapping[str, Any] | None = None, path: str | None = None
) -> nn.Module:
    """The class `architecture` of transformers (`GPT2LMHeadModel`, ...), with fresh or saved weights.

    `config` are the settings of its configuration that differ from the library's defaults, or from those in
    the local folder `path`, which `save_pretrained` wrote. Caches for generating text are off by default. Use
    `loss: model`, and data whose samples are dicts of the model's arguments, including labels.
    """
    library = load_transformers(f"model: {architecture}")
    model_class = getattr(library, architecture, None)
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        names = [name for name in dir(library) if "For" in name or name.endswith("Model")]
        raise JobError(
            f"model_args.architecture: found {architecture!r}, expected a model class of transformers"
            f"{did_you_mean(architecture, names)}"
        )
    settings: Any = model_class.config_class  # type: ignore[attr-defined]
    given = _checked(settings, dict(config or {}))
    if path is None:
        made: nn.Module = model_class(settings(**given))
        return made
    folder = Path(expand_path(path, "model_args.path", JobError))
    if not (folder / "config.json").is_file():
        raise JobError(
            f"model_args.path: found no config.json in {folder}, expected a folder that save_pretrained wrote"
        )
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except ValueError as failure:
        raise JobError(f"model_args.path: {folder / 'config.json'} is no JSON file: {failure}") from None
    if kind != settings.model_type:
        raise JobError(
            f"model_args.path: {folder} has a model of type {kind!r}, expected {settings.model_type!r} for "
            f"{architecture}"
        )
    loaded: Any = model_class
    try:
        saved: nn.Module = loaded.from_pretrained(folder, local_files_only=True, dtype=torch.float32, **given)
    except Exception as failure:  # each kind of file has other errors
        why = str(failure).strip().partition("\n")[0]
        unlike = " (other sizes in model_args.config than the weights have?)" if config else ""
        raise JobError(
            f"model_args.path: transformers cannot load the weights in {folder}: {why}{unlike}"
        ) from failure
    return saved.train()


def saved_weights_id(path: str) -> str | None:
    """A text that tells the weights in a folder from others: sizes, and bytes from all over each file.

    None if there is no such folder here.
    """
    folder, found = Path(expand_path(path, "model_args.path", JobError)), hashlib.sha256()
    files = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", ".bin", ".pt"))
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for number in range(_SAMPLES):
                content.seek(size * number // _SAMPLES)
                found.update(content.read(_SAMPLED_BYTES))
    return found.hexdigest() if files else None


def factory_of(name: str) -> Callable[..., nn.Module] | None:
    """The factory that `transformers:NAME` stands for in a job; None for other names."""
    library, _, architecture = name.partition(":")
    return partial(from_config, architecture) if library == "transformers" else None


def load_transformers(what: str) -> Any:
    """Import the transformers library; the error if it is missing names `what` needs it."""
    check_extra("transformers", what, JobError)
    import transformers

    return transformers


def _checked(settings: Any, config: dict[str, Any]) -> dict[str, Any]:
    """`config`; raises for unknown keys, which the configuration would ignore."""
    default = settings()
    known = default.to_dict()
    aliases = getattr(settings, "attribute_map", {})
    for name in config:
        # Every model has special token ids, whether or not it has a default for them.
        if name not in known and not hasattr(default, name) and not name.endswith("_token_id"):
            raise JobError(
                f"model_args.config.{name}: {settings.__name__} has no such setting"
                f"{did_you_mean(name, [*known, *aliases])}"
            )
    return {**({"use_cache": False} if "use_cache" in known else {}), **config}
