"""Names given as text: import the object they name, and suggest the nearest valid name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.core.aliases import ALIASES
from plait.core.errors import InputError, PlaitError
from plait.core.shown import listed, shortened, shown
from plait.core.units import count_of

# Comparing longer names takes long, and they are no misspellings.
_LONGEST_NAME = 100
_CORE_FOLDER = Path(__file__).parent
# The extra of `plait` that installs each optional package.
EXTRAS = {
    "PIL": "images",
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "optuna": "optuna",
    "peft": "peft",
    "ray": "ray",
    "starlette": "watch",
    "tensorboard": "tensorboard",
    "transformers": "transformers",
    "uvicorn": "watch",
    "wandb": "wandb",
}


def nearest(name: object, valid: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The valid name for which `name` is an alias or that is most similar, or None if nothing is close."""
    valid = list(valid)
    text = str(name) if isinstance(name, (str, int)) and not isinstance(name, bool) else ""
    if not text or len(text) > _LONGEST_NAME:
        return None
    if text in valid:  # right name, wrong section
        return text
    for meant in ALIASES.get(text.lower().replace("_", "").replace("-", ""), ()):
        if meant in valid:
            return meant
    by_lower = {each.lower(): each for each in reversed(valid)}
    close = difflib.get_close_matches(text.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or `; valid: a, b, c` if nothing is close."""
    valid = list(valid)
    close = nearest(name, valid)
    if close is not None:
        return f"; did you mean {close!r}?"
    return f"; valid: {listed(sorted(valid), 500)}" if valid else ""


def user_folders() -> list[str]:
    """The folders on the Python path without the standard library and installed packages."""
    paths = sysconfig.get_paths()
    installed = {paths["purelib"], paths["platlib"], paths["scripts"], *site.getsitepackages()}
    installed.add(site.getusersitepackages())
    folders = dict.fromkeys(os.path.abspath(folder) for folder in sys.path)
    not_installed = [folder for folder in folders if folder not in installed and os.path.isdir(folder)]
    stdlib = paths["stdlib"] + os.sep
    return [folder for folder in not_installed if not f"{folder}{os.sep}".startswith(stdlib)]


@contextlib.contextmanager
def searching(*folders: str | None) -> Iterator[None]:
    """Append `folders` to the Python path within the block.

    They come last, so that modules in them never hide those of the standard library or installed packages.
    """
    added = [each for each in dict.fromkeys(folders) if each and each not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for each in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(each)


def resolve(path: str, key: str, error: type[InputError] = InputError) -> Any:
    """Import the object `package.module:name`.

    `key` is the key of the path in the job (`model`, `data.kind`), for error messages.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise error(f"{key}: found {shown(path)}; expected 'package.module:name'")
    if module_name == "__main__":
        raise error(f"{key}: found {shown(path)}; {not_in_script(attribute)}")
    target = _import(module_name, path, key, error)
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            hint = nearest(part, [n for n in dir(target) if not n.startswith("_")])
            suggestion = f"; did you mean {hint!r}?" if hint else ""
            raise error(
                f"{key}: found {shown(path)}, but {shortened(module_name)} has no {shown(part)}{suggestion}"
                f"{_hidden(module_name)}"
            ) from None
        except PlaitError as failure:
            raise error(f"{key}: {failure}") from failure
        except Exception as failure:  # a module may define __getattr__
            raise error(f"{key}: {shown(path)} cannot be read: {in_words(failure)}") from failure
    return target


def _import(module_name: str, path: str, key: str, error: type[InputError]) -> Any:
    failed = f"{key}: importing {shortened(module_name)} failed"
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (module_name + ".").startswith(missing.name + "."):
            raise error(
                f"{key}: found {shown(path)}, but there is no module {shown(missing.name)} on the Python "
                f"path; expected an importable 'package.module:name' (the current folder and the job file's "
                f"are searched too)"
            ) from None
        raise error(
            f"{failed}: {shortened(str(missing), 500)}{line_of(missing)}{_hidden(module_name)}"
        ) from missing
    except (Exception, SystemExit) as failure:  # importing a user's module may raise anything
        raise error(f"{failed}: {in_words(failure)}{line_of(failure)}") from failure


def has_extra(package: str) -> bool:
    """Whether an optional package is installed; it is not imported."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def check_extra(package: str, what: str, error: type[InputError] = InputError) -> None:
    """Refuse `what` if the optional package that it needs is not installed."""
    if not has_extra(package):
        raise error(f"{what} needs {package}, which is not installed; {how_to_install(package)}")


def how_to_install(package: str) -> str:
    return f"pip install 'plait[{EXTRAS[package]}]'"


def not_in_script(name: str) -> str:
    """The message for a name in the script that is run."""
    return (
        f"workers are separate processes and do not import the script: put {shortened(name)} into a file "
        f"next to it, say models.py, and write 'models:{shortened(name)}'"
    )


def line_of(failure: BaseException) -> str:
    """` (file, line 3)`: the line of the user's code that failed, if known."""
    if isinstance(failure, SyntaxError):
        return ""  # its message has it
    frames = [
        frame for frame in traceback.extract_tb(failure.__traceback__) if "<frozen" not in frame.filename
    ]
    outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(_CORE_FOLDER)]
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    user_frames = [frame for frame in outside if not frame.filename.startswith(libraries)]
    if not outside:
        return ""
    frame = (user_frames or outside)[-1]
    return f" ({Path(frame.filename).name}, line {frame.lineno})"


def _hidden(module_name: str) -> str:
    """The hint if a module of the user is hidden by another one of the same name."""
    name = module_name.partition(".")[0]
    used = getattr(sys.modules.get(name), "__file__", None)
    for folder in map(Path, user_folders()):
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file() and not (used is not None and file.samefile(used)):
                what = f"the module in {used}" if used is not None else "a built-in module"
                return f" ({file} is hidden by {what} of the same name; give it another one)"
    return ""


def in_words(failure: BaseException) -> str:
    """`ValueError: its message`, shortened."""
    return f"{type(failure).__name__}: {shortened(str(failure), 500)}".removesuffix(": ")


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or class; empty for a builtin without signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def check_arguments(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    key: str,
    error: type[InputError] = InputError,
    positional: int = 0,
    reserved: Iterable[str] = (),
) -> None:
    """Raise `error` for arguments that `function` does not take, or that it needs and did not get.

    `positional` is the number of leading parameters that the caller fills; `reserved` are other keys of the
    same section, which are suggested too.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature to check against
        return
    name = getattr(function, "__name__", None) or shown(function)
    filled = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(filled) < positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        expected = count_of(positional, "positional argument")
        raise error(f"{key}: {name} takes {len(filled) or 'none'}, but is called with {expected}")
    parameters = parameters[positional:]
    keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for given in arguments:
        if given not in keyword and not takes_any:
            hint = did_you_mean(given, [*keyword, *reserved])
            raise error(f"{key}.{shortened(str(given))}: {name} takes no {shown(given)}{hint}")
    needed = [n for n, p in keyword.items() if p.default is p.empty and n not in arguments]
    if needed:
        raise error(f"{key}: {name} needs {', '.join(repr(n) for n in needed)}; add {key}.{needed[0]}")
