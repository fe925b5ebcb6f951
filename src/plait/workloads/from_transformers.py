"""Models of the transformers library, made from a configuration; they compute their own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from plait.core.errors import JobError
from plait.core.names import check_extra, did_you_mean


def from_config(architecture: str, config: Mapping[str, Any] | None = None) -> nn.Module:
    """The class `architecture` of transformers (`GPT2LMHeadModel`, ...) with fresh weights.

    `config` are the settings of its configuration that differ from the library's defaults. Caches for
    generating text are off by default. Use `loss: model`, and data whose samples are dicts of the model's
    arguments, including labels.
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
    made: nn.Module = model_class(settings(**_checked(settings, dict(config or {}))))
    return made


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
