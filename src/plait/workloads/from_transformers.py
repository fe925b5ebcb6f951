"""Models of the transformers library, made from a configuration; they compute their own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from plait.core.errors import JobError
from plait.core.names import did_you_mean


def from_config(architecture: str, config: Mapping[str, Any] | None = None) -> nn.Module:
    """The class `architecture` of transformers (`GPT2LMHeadModel`, ...) with fresh weights.

    `config` are the settings of its configuration that differ from the library's defaults. Caches for
    generating text are off unless it says otherwise. Use `loss: model`, and data whose samples are dicts of
    the model's arguments, labels included.
    """
    library = load_transformers(f"model: {architecture}")
    found = getattr(library, architecture, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        names = [name for name in dir(library) if "For" in name or name.endswith("Model")]
        raise JobError(
            f"model_args.architecture: found {architecture!r}, expected a model class of transformers"
            f"{did_you_mean(architecture, names)}"
        )
    settings: Any = found.config_class  # type: ignore[attr-defined]
    made: nn.Module = found(settings(**_checked(settings, dict(config or {}))))
    return made


def load_transformers(what: str) -> Any:
    """The transformers library; where it is missing, `what` needs it is said with the remedy."""
    try:
        import transformers
    except ImportError:
        raise JobError(
            f"{what} needs the transformers library, which is missing; pip install transformers"
        ) from None
    return transformers


def _checked(settings: Any, config: dict[str, Any]) -> dict[str, Any]:
    """`config`, refused where it has a key that the configuration does not know, which it would ignore."""
    default = settings()
    known = default.to_dict()
    aliases = getattr(settings, "attribute_map", {})
    for name in config:
        # Numbers of special tokens belong to every model, whether or not it has a default for them.
        if name not in known and not hasattr(default, name) and not name.endswith("_token_id"):
            raise JobError(
                f"model_args.config.{name}: {settings.__name__} has no such setting"
                f"{did_you_mean(name, [*known, *aliases])}"
            )
    return {**({"use_cache": False} if "use_cache" in known else {}), **config}
