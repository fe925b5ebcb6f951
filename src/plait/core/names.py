"""Names given as text: import what they point to, and suggest the nearest when they miss."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from plait.core.errors import InputError


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name most like `name`, or None when nothing comes close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return close[0] if close else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or `; valid: a, b, c` when nothing is near."""
    valid = list(valid)
    close = nearest(name, valid)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; valid: {', '.join(sorted(valid))}" if valid else ""


def resolve(path: str, key: str, error: type[InputError] = InputError) -> Any:
    """The object that `package.module:name` points to.

    `key` is where the user wrote the path (`model`, `data.kind`), so that the message can name it.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise error(f"{key}: found {path!r}; expected 'package.module:name'")
    module = _import(module_name, path, key, error)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [n for n in dir(target) if not n.startswith("_")]
            hint = nearest(part, names)
            suggestion = f"; did you mean {hint!r}?" if hint else ""
            raise error(f"{key}: found {path!r}, but {module_name} has no {part!r}{suggestion}")
        target = getattr(target, part)
    return target


def _import(module_name: str, path: str, key: str, error: type[InputError]) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (module_name + ".").startswith(missing.name + "."):
            raise error(
                f"{key}: found {path!r}, but there is no module {missing.name!r} on the Python path; "
                f"expected an importable 'package.module:name' (the current folder is searched too)"
            ) from None
        raise error(f"{key}: importing {module_name} failed: {missing}") from missing
    except Exception as failure:  # a user's module may fail in any way while it is imported
        raise error(
            f"{key}: importing {module_name} failed: {type(failure).__name__}: {failure}"
        ) from failure


def check_arguments(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    key: str,
    error: type[InputError] = InputError,
    positional: int = 0,
    beside: Iterable[str] = (),
) -> None:
    """Refuse arguments that `function` does not take, or that it needs and did not get.

    `positional` says how many leading parameters the caller fills by itself; `beside` are keys that stand
    at the same place and may have been meant.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[positional:]
    except (TypeError, ValueError):  # some builtins have no signature to check against
        return
    name = getattr(function, "__name__", repr(function))
    keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for given in arguments:
        if given not in keyword and not takes_any:
            raise error(f"{key}.{given}: {name} takes no {given!r}{did_you_mean(given, [*keyword, *beside])}")
    needed = [n for n, p in keyword.items() if p.default is p.empty and n not in arguments]
    if needed:
        raise error(f"{key}: {name} needs {', '.join(repr(n) for n in needed)}; add {key}.{needed[0]}")
