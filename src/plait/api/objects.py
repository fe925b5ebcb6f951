"""Objects of a script as parts of a job: kept by value in the run's folder, and named by their checksum.

`plait.api.objects:kept_CHECKSUM.Net` is such a name. It is found, like a module, in the folders of the Python
path, of which the run's is one for its workers: `objects/CHECKSUM.pkl` has the pickled objects. So a job with
objects is a job like any other, also when it is resumed or evaluated in another process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle

from plait.core.errors import InputError
from plait.core.files import write_atomic
from plait.core.names import in_words
from plait.core.shown import shown

FOLDER = "objects"
_PREFIX = "kept_"


@dataclass(frozen=True)
class KeptObjects:
    """The objects of a job: `names` are what the job calls them, and `files` what its run folder must have.

    `shared` are those of `files`, by the name that stands for them all.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    shared: Mapping[str, SimpleNamespace] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let their names mean these objects themselves within the block, rather than copies of them."""
        _in_use.update(self.shared)
        try:
            yield
        finally:
            for name in self.shared:
                _in_use.pop(name, None)


def keep(objects: Mapping[str, object]) -> KeptObjects:
    """A name for each of `objects`, which are functions, classes or callable objects.

    What can be imported by another process is named so; the rest is pickled by value.
    """
    names = {key: name for key, value in objects.items() if (name := importable_name(value)) is not None}
    rest = {key: value for key, value in objects.items() if key not in names}
    if not rest:
        return KeptObjects(names)
    labels = _labels(rest)
    namespace = {labels[key]: value for key, value in rest.items()}
    content = _pickled(rest, namespace)
    checksum = _checksum(content)
    shared = f"{_PREFIX}{checksum}"
    names |= {key: f"{__name__}:{shared}.{labels[key]}" for key in rest}
    return KeptObjects(names, {f"{FOLDER}/{checksum}.pkl": content}, {shared: SimpleNamespace(**namespace)})


def save_object(path: Path, value: object) -> None:
    """Write an object to a file of a run's folder."""
    write_atomic(path, bytes(cloudpickle.dumps(value)), private=True)


def load_object(path: Path) -> Any:
    """The object that `save_object` wrote."""
    return pickle.loads(path.read_bytes())


def importable_name(value: object) -> str | None:
    """`package.module:name` of a function or class that any process with this Python path can import."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    if getattr(found, "__file__", None) is None:  # made in this process alone
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value else None


def _labels(objects: Mapping[str, object]) -> dict[str, str]:
    """The last part of each name: the object's own name where it has one that no other has."""
    own = {key: getattr(value, "__name__", "") for key, value in objects.items()}
    used = [*own.values(), *objects]
    return {key: name if name.isidentifier() and used.count(name) == 1 else key for key, name in own.items()}


def _pickled(objects: Mapping[str, object], namespace: Mapping[str, object]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(namespace))
    except Exception as failure:  # a user's objects may raise anything
        for key, value in objects.items():
            try:
                cloudpickle.dumps(value)
            except Exception as own_failure:
                raise InputError(
                    f"{key}: {shown(value)} cannot be pickled ({in_words(own_failure)}), but workers and "
                    f"later processes have copies of it; leave open files, locks and connections out of it, "
                    f"or open them on first use"
                ) from own_failure
        raise InputError(f"the objects cannot be pickled together: {in_words(failure)}") from failure


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# By name: those of runs in this process.
_in_use: dict[str, SimpleNamespace] = {}


def __getattr__(name: str) -> SimpleNamespace:
    if not name.startswith(_PREFIX):
        raise AttributeError(name)
    return _in_use[name] if name in _in_use else _load(name.removeprefix(_PREFIX))


@functools.lru_cache(maxsize=2)
def _load(checksum: str) -> SimpleNamespace:
    """The objects that an earlier process has kept; InputError if they are not found, or not the same."""
    file = f"{FOLDER}/{checksum}.pkl"
    paths = [path for folder in sys.path if (path := Path(folder) / file).is_file()]
    if not paths:
        raise InputError(
            f"its run was started with objects of a script, kept in {file} of the run's folder, which is not "
            f"there; put the file back, or call plait.train with the objects again"
        )
    content = paths[0].read_bytes()
    if _checksum(content) != checksum:
        raise InputError(f"{paths[0]}: its content has changed since the run was started; put it back")
    try:
        return SimpleNamespace(**pickle.loads(content))
    except Exception as failure:  # it imports and runs a user's code
        raise InputError(
            f"{paths[0]}: the objects of the run cannot be loaded here: {in_words(failure)}; modules that "
            f"they use must be on the Python path, in the versions of then"
        ) from failure
