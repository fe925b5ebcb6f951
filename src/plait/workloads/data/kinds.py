"""Data sets by name, their options checked before anything is read."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError, DataError
from plait.core.files import expand_path
from plait.core.names import check_arguments, did_you_mean, resolve
from plait.workloads.data.cifar import cifar
from plait.workloads.data.continued_text import continued_text
from plait.workloads.data.digits import digits
from plait.workloads.data.fashion_mnist import fashion_mnist
from plait.workloads.data.image_folder import image_folder
from plait.workloads.data.stored import MapDataset, Split, is_stream
from plait.workloads.data.synthetic import synthetic
from plait.workloads.data.text import text

KINDS: Mapping[str, Callable[..., MapDataset]] = {
    "cifar": cifar,
    "continued-text": continued_text,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "image-folder": image_folder,
    "synthetic": synthetic,
    "text": text,
}


def build(kind: str, split: Split, **options: Any) -> Any:
    """The data set of that kind: one of `KINDS`, or a user's `package.module:name`.

    A user's function or class is called with the split and the options unchanged, and may return a stream, or
    None if there is no test split. Options of built-in kinds are converted from the job file: paths from
    text, shapes from lists.
    """
    kind, options = in_place_of(kind, options)
    factory, values = check(kind, options)
    try:
        dataset: Any = factory(split, **values)
    except Exception as failure:
        if split == "test" and not isinstance(failure, DataError):
            failure.add_note(
                f"data.kind: {kind} failed for the split 'test'; return None where there is none"
            )
        raise
    if dataset is None and split == "test":
        return None
    _refuse_others(dataset, f"data.kind: {kind} returned", repr(split))
    if is_stream(dataset):
        return dataset
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data.kind: {kind} returned a {type(dataset).__name__} for {split!r}, expected a map-style data "
            f"set with __len__ and __getitem__, or an IterableDataset"
        )
    if len(dataset) == 0:
        raise DataError(f"data.kind: {kind} returned an empty data set for {split!r}")
    return dataset


def _refuse_others(dataset: Any, returned: str, split: str) -> None:
    """Raise for a DataLoader or a collection of data sets instead of one."""
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{returned} a DataLoader for {split}, expected the data set: return loader.dataset, and let the "
            f"job say how batches are made (data.batch_size, shuffle, last_batch, loaders, collate_fn)"
        )
    if isinstance(dataset, (tuple, list)) and any(isinstance(each, Dataset) for each in dataset):
        raise DataError(
            f"{returned} a {type(dataset).__name__} of {len(dataset)} data sets for {split}, expected one: "
            f"the one that `split` names"
        )
    # Whether something is a mapping takes milliseconds in a new process.
    if hasattr(dataset, "keys") and isinstance(dataset, Mapping) and 0 not in dataset:
        raise DataError(
            f"{returned} a {type(dataset).__name__} for {split}, expected one data set: if it has one for "
            f"each split, return found[split]"
        )


def check(kind: str, options: Mapping[str, Any]) -> tuple[Callable[..., MapDataset], dict[str, Any]]:
    """The factory of that kind, and its converted options; raises for wrong options, reads no data."""
    kind, options = in_place_of(kind, options)
    factory = factory_of(kind)
    _check_split(factory, kind, options)
    reserved = ("batch_size", "shuffle", "last_batch", "loaders", "collate_fn")
    check_arguments(factory, options, "data", DataError, positional=1, reserved=reserved)
    return factory, _converted(factory, options) if kind in KINDS else dict(options)


def _check_split(factory: Callable[..., Any], kind: str, options: Mapping[str, Any]) -> None:
    """Raise if a factory does not take the split as its first argument."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return
    name = kind.rpartition(":")[2]
    placed = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if not placed:
        how = "" if not parameters else " by position"
        raise DataError(
            f"data.kind: {kind} takes no argument{how}; expected the split, 'train' or 'test', to come "
            f"first: def {name}(split)"
        )
    first = placed[0].name
    if first in options and placed[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise DataError(
            f"data.{first}: {name} has {first!r} first, where it gets the split; expected "
            f"{name}(split, {first}, ...)"
        )


def in_place_of(kind: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The effective kind and options: for kind `synthetic`, those in the option `synthetic`, if given.

    So `--set data.kind=synthetic` runs a job without its files.
    """
    rest = {name: value for name, value in options.items() if name != "synthetic"}
    replacement = options.get("synthetic")
    if replacement is not None and not isinstance(replacement, Mapping):
        raise DataError(
            f"data.synthetic: found {replacement!r}, expected the options of kind: synthetic, or another "
            f"kind and its options, such as {{shape: [8], samples: 64}}"
        )
    if kind != "synthetic" or replacement is None:
        return kind, rest
    return str(replacement.get("kind", "synthetic")), {
        n: value for n, value in replacement.items() if n != "kind"
    }


def factory_of(kind: str) -> Callable[..., MapDataset]:
    if kind in KINDS:
        return KINDS[kind]
    if ":" not in kind:
        raise DataError(
            f"data.kind: unknown kind {kind!r}{did_you_mean(kind, KINDS)}; "
            f"a data set of your own is written 'package.module:name'"
        )
    factory = resolve(kind, "data.kind", DataError)
    if not callable(factory):
        raise DataError(
            f"data.kind: {kind} is {factory!r}, expected a function or class that takes the split"
        )
    return cast("Callable[..., MapDataset]", factory)


def _converted(factory: Callable[..., MapDataset], options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` converted to the factory's annotated types; an error names the option."""
    hints = typing.get_type_hints(factory)
    return {name: _convert(hints[name], value, f"data.{name}") for name, value in options.items()}


def _convert(hint: Any, value: Any, key: str) -> Any:
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
    if choices is not None and value not in choices:
        raise DataError(f"{key}: found {value!r}, expected one of {', '.join(str(c) for c in choices)}")
    try:
        converted = decode(hint, encode(value), key)
    except ArtefactError as failure:
        raise DataError(str(failure)) from None
    return Path(expand_path(str(converted), key, DataError)) if isinstance(converted, Path) else converted
