"""Checkpoints: whole or absent, checked before use, by parameter name, never unpickled.

A checkpoint is a folder `step-N` with `model.safetensors`, `optimizer.safetensors`, `sync.safetensors` where
the workers' agreement has state of its own, and `state.json`, which holds the progress, what is not a tensor,
and each file's size and checksum. It is written aside, flushed to disk and renamed. Random numbers need no
state: they are a function of the seed, the step and the rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.comm.collectives import Specs, broadcast_named, broadcast_value
from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError
from plait.core.files import sync_folder, write_atomic, writing
from plait.core.shown import shown
from plait.pipeline.named_state import Tensors, is_packed, model_state, unpacked

T = TypeVar("T")

VERSION = 2
# Version 1 had no checksum of its state.
READ_VERSIONS = (1, VERSION)
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SYNC = "sync.safetensors"
_OLD = ".old-"
_NAME = re.compile(r"step-\d+")
log = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some step. `model` and `optimizer` are keyed by parameter name.

    So is `sync`, what the agreement of workers keeps besides: an outer optimizer's state.
    """

    step: int
    model: Tensors
    optimizer: Tensors
    progress: Mapping[str, Any]
    sync: Tensors = field(default_factory=dict)
    # Where tensors were written to as they came, instead of in `model` and `optimizer`.
    written: Written | None = None
    # Where they are to be read from one by one.
    stored: StoredCheckpoint | None = None


@dataclass(frozen=True)
class Written:
    """Files of tensors of a checkpoint to come, and the further names of tied ones.

    `broken` is the first tensor among them that `find_broken` would find.
    """

    model: Path
    optimizer: Path
    tied: Mapping[str, str]
    broken: str | None = None


@dataclass(frozen=True)
class EngineState:
    """The tensors of a checkpoint, by parameter name; `sync` is what agreement keeps besides."""

    model: Tensors
    optimizer: Tensors
    sync: Tensors = field(default_factory=dict)
    # Where tensors were written to as they came, instead of in `model` and `optimizer`.
    written: Written | None = None
    # What the optimizer keeps and no checkpoint holds, in words.
    unsaved: tuple[str, ...] = ()
    # The state of the loss scaler, and the forwards behind the trial, where its random numbers go on.
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    age: int = 0

    def find_broken(self, weights: Container[str]) -> str | None:
        """The name of a tensor that no checkpoint should hold, if there is one; see `find_broken`."""
        if self.written is not None:
            return self.written.broken
        others = {**self.optimizer, **self.sync}
        return find_broken(self.model, weights) or find_broken(others)

    def discard(self) -> None:
        """Remove what was written aside and no checkpoint has taken."""
        if self.written is not None:
            self.written.model.unlink(missing_ok=True)
            self.written.optimizer.unlink(missing_ok=True)


def check_optimizer(progress: Mapping[str, Any], kind: str) -> None:
    """Refuse the state of another kind of optimizer."""
    found = progress.get("optimizer")
    if found != kind:
        raise CheckpointError(f"its optimizer is {found!r}, the job's is {kind!r}; resume with the same one")


def load_model_state(model: torch.nn.Module, state: Tensors) -> None:
    """Put `state` into `model`; a difference in names or shapes is an error, with the first one found."""
    own = model_state(model)
    for name, value in own.items():
        if name not in state:
            raise CheckpointError(f"it has no {name!r}, which the model has; is it of another model?")
        if state[name].shape != value.shape and not is_packed(state[name]):
            found, expected = tuple(state[name].shape), tuple(value.shape)
            raise CheckpointError(f"{name!r} has shape {found} there and {expected} in the model")
    if extra := sorted(state.keys() - own.keys()):
        raise CheckpointError(f"it has {extra[0]!r}, which the model has not; is it of another model?")
    model.load_state_dict(unpacked(state))


def broadcast(
    checkpoint: Checkpoint | None, source: int = 0, group: dist.ProcessGroup | None = None
) -> Checkpoint:
    """The checkpoint of rank `source`, on all ranks of a group, which call it together; others give None."""
    state = checkpoint or Checkpoint(0, {}, {}, {})
    step, progress = broadcast_value([state.step, dict(state.progress)], source, group)
    tensors = (state.model, state.optimizer, state.sync)
    model, optimizer, sync = (broadcast_named(each, source, group) for each in tensors)
    return Checkpoint(step, model, optimizer, progress, sync)


def find_broken(tensors: Mapping[str, Tensor], weights: Container[str] | None = None) -> str | None:
    """The name of a tensor that no checkpoint should hold, if there is one: of values that are no numbers.

    Infinities are let pass in what is not among `weights`, where these are given: training does not change a
    mask, and whoever made it knows why. Values are looked at where they lie; the caller waits once a device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            values = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
            largest = torch.linalg.vector_norm(values, math.inf).double()
            by_device.setdefault(tensor.device, {})[name] = largest
    for found in by_device.values():
        for name, value in zip(found, torch.stack(list(found.values())).tolist()):
            if math.isnan(value) or (math.isinf(value) and (weights is None or name in weights)):
                return name
    return None


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` below `folder`, whole or not at all; returns where it is.

    DiskError where the disk does not take it. What was written of it is removed unless this process is
    killed; several may write at once, also the same step.
    """
    final = folder / _name(checkpoint.step)
    aside = folder / f".{final.name}.{uuid.uuid4().hex}"
    try:
        with writing(final):
            _write(aside, checkpoint)
            _replace(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _write(aside: Path, checkpoint: Checkpoint) -> None:
    aside.mkdir(parents=True)
    if checkpoint.written is not None:
        tied = dict(checkpoint.written.tied)
        checkpoint.written.model.rename(aside / MODEL)
        checkpoint.written.optimizer.rename(aside / OPTIMIZER)
    else:
        model, tied = _without_repeats(checkpoint.model)
        _save_tensors(model, aside / MODEL)
        _save_tensors({k: v.contiguous() for k, v in checkpoint.optimizer.items()}, aside / OPTIMIZER)
    if checkpoint.sync:
        # Copied: they may be views of one memory, which such a file does not take.
        _save_tensors({k: v.clone() for k, v in checkpoint.sync.items()}, aside / SYNC)
    files = {path.name: _seal(path) for path in sorted(aside.glob("*.safetensors"))}
    _write_state(aside, _State(checkpoint.step, dict(checkpoint.progress), tied, files))
    sync_folder(aside)


def _write_state(path: Path, found: _State) -> None:
    # As it will be read again.
    plain = json.loads(json.dumps({"plait": "checkpoint", "version": VERSION, **asdict(found)}))
    write_atomic(path / STATE, json.dumps({**plain, "crc32": _checksum_of(plain)}, indent=1))


def update_progress(folder: Path, step: int, progress: Mapping[str, Any]) -> None:
    """Let the checkpoint of `step` below `folder` say what is known since it was written."""
    path = folder / _name(step)
    _write_state(path, replace(_read_state(path), progress=dict(progress)))


def _save_tensors(tensors: Tensors, path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as failure:
        # Its own error has no number; the disk's is in its words.
        found = re.search(r"os error (\d+)", str(failure))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from failure


def write_in_turn(
    path: Path, specs: Specs, tensors: Iterable[tuple[str, Tensor]], weights: Container[str] | None = None
) -> str | None:
    """Write named tensors, in the order of `specs`, into one file of safetensors as they come.

    Returns the name of the first that `find_broken` finds.
    """
    broken = None
    header, offset = {}, 0
    for name, (dtype, shape) in specs.items():
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        kind = _DTYPES[getattr(torch, dtype)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            broken = broken or find_broken({name: tensor}, weights)
            if tensor.numel():
                content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(content.numpy().data)
    return broken


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file of safetensors, each read when it is asked for.

    Read, not mapped: a mapping would count as memory of the whole file where that is limited.
    """

    def __init__(self, path: Path, tied: Mapping[str, str] | None = None) -> None:
        self._path = path
        header, self._start = _read_header(path)
        self._places = dict(header)
        for alias, name in (tied or {}).items():
            if name not in header:
                raise CheckpointError(f"{path}: {alias!r} is tied to {name!r}, which is not there")
            self._places[alias] = header[name]

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        start, end = place.data_offsets
        content = torch.empty(end - start, dtype=torch.uint8)
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            file.readinto(content.numpy().data)
        return content.view(_BY_NAME[place.dtype]).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return _BY_NAME[self._places[name].dtype]


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a file of safetensors, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(path: Path) -> tuple[dict[str, _Place], int]:
    """The places of all tensors in a file of safetensors, and where its header ends; checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise CheckpointError(
                f"{path}: its header has {length:,} bytes, the file {size:,}; it is damaged"
            )
        try:
            content = json.loads(file.read(length))
            content.pop("__metadata__", None)
            header = decode(dict[str, _Place], content, str(path))
        except (ValueError, TypeError, AttributeError, RecursionError, ArtefactError) as failure:
            raise CheckpointError(f"{path}: its header cannot be read ({failure}); it is damaged") from None
    for name, place in header.items():
        start, end = place.data_offsets
        dtype = _BY_NAME.get(place.dtype)
        expected = None if dtype is None else math.prod(place.shape) * dtype.itemsize
        fits = 0 <= start <= end <= size - 8 - length and min(place.shape, default=0) >= 0
        if not fits or end - start != expected:
            raise CheckpointError(
                f"{path}: {shown(name)} of type {shown(place.dtype)} and shape {shown(place.shape)} lies at "
                f"bytes {start} to {end}; it is damaged"
            )
    return header, 8 + length


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose tensors stay on disk until they are asked for."""

    step: int
    model: StoredTensors
    optimizer: StoredTensors
    progress: Mapping[str, Any]


def open_stored(path: Path) -> StoredCheckpoint:
    """The checkpoint at `path`, checked whole, its tensors not read."""
    state = _read_state(path)
    for name, seal in state.files.items():
        _check_file(path / name, seal)
    try:
        model, optimizer = StoredTensors(path / MODEL, state.tied), StoredTensors(path / OPTIMIZER)
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure}") from None
    return StoredCheckpoint(state.step, model, optimizer, state.progress)


def load_lazily(path: Path) -> Checkpoint:
    """The checkpoint at `path` for a model that no worker holds as a whole; its tensors are read later."""
    stored = open_stored(path)
    return Checkpoint(stored.step, {}, {}, stored.progress, stored=stored)


def check_names(model: torch.nn.Module, stored: StoredTensors) -> None:
    """Refuse the tensors of another model, with the first difference in names or shapes."""
    own = model.state_dict()
    for name, value in own.items():
        if name not in stored:
            raise CheckpointError(f"it has no {name!r}, which the model has; is it of another model?")
        if stored.shape(name) != value.shape:
            found, expected = stored.shape(name), tuple(value.shape)
            raise CheckpointError(f"{name!r} has shape {found} there and {expected} in the model")
    if extra := sorted(set(stored) - own.keys()):
        raise CheckpointError(f"it has {extra[0]!r}, which the model has not; is it of another model?")


def _replace(aside: Path, final: Path) -> None:
    """Put `aside` in the place of `final`; what was there is found by `list_checkpoints` until it is done."""
    while True:
        old = final.with_name(f"{_OLD}{final.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            final.rename(old)
        try:
            aside.rename(final)
        except OSError as failure:
            # Another writer has put its own there in between.
            if failure.errno in (errno.EEXIST, errno.ENOTEMPTY):
                continue
            raise
        finally:
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
        sync_folder(final.parent)
        return


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _without_repeats(state: Tensors) -> tuple[Tensors, dict[str, str]]:
    """Each tensor once, and the further names of tied ones: a file of safetensors holds no shared memory."""
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    tensors: Tensors = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            tensors[name] = value.contiguous()
    return tensors, tied


def _seal(path: Path) -> _FileSeal:
    """Flush `path` to disk; its size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _FileSeal(path.stat().st_size, _checksum(path))


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path`, checked whole; a truncated, damaged or foreign one is refused."""
    state = _read_state(path)
    for name, seal in state.files.items():
        _check_file(path / name, seal)
    try:
        model = load_file(path / MODEL)
        optimizer = load_file(path / OPTIMIZER)
        sync = load_file(path / SYNC) if SYNC in state.files else {}
    except (SafetensorError, OSError) as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure}") from None
    for alias, name in state.tied.items():
        if name not in model:
            raise CheckpointError(f"{path}/{STATE}: {alias!r} is tied to {name!r}, which is not there")
        model[alias] = model[name]
    return Checkpoint(state.step, model, optimizer, state.progress, sync)


@dataclass(frozen=True)
class _FileSeal:
    bytes: int
    crc32: int


@dataclass(frozen=True)
class _State:
    """What `state.json` holds, besides its kind and version."""

    step: int
    progress: Mapping[str, Any]
    tied: Mapping[str, str]
    files: Mapping[str, _FileSeal]


def _check_file(file: Path, seal: _FileSeal) -> None:
    if not file.exists():
        raise CheckpointError(f"{file}: missing")
    size = file.stat().st_size
    if size != seal.bytes:
        raise CheckpointError(f"{file}: {size} bytes, expected {seal.bytes}; it is truncated")
    if _checksum(file) != seal.crc32:
        raise CheckpointError(f"{file}: its checksum differs from the one in {STATE}; it is damaged")


def _read_state(path: Path) -> _State:
    try:
        state = json.loads((path / STATE).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {STATE} in it; it is not a whole checkpoint of Plait's") from None
    except (OSError, ValueError, RecursionError) as failure:
        raise CheckpointError(f"{path}/{STATE}: cannot be read: {failure}") from None
    if not isinstance(state, dict) or state.pop("plait", None) != "checkpoint":
        raise CheckpointError(f"{path}/{STATE}: not a checkpoint of Plait's")
    if (version := state.pop("version", None)) not in READ_VERSIONS:
        raise CheckpointError(f"{path}: version {shown(version)}, this Plait reads version {VERSION}")
    checksum = state.pop("crc32", None)
    if version == VERSION and checksum != _checksum_of({"plait": "checkpoint", "version": version, **state}):
        raise CheckpointError(f"{path}/{STATE}: its checksum is wrong; it is damaged")
    try:
        found = decode(_State, state, f"{path}/{STATE}")
    except ArtefactError as failure:
        raise CheckpointError(f"{failure}; it is damaged") from None
    if found.step < 0 or found.files.keys() - {SYNC} != {MODEL, OPTIMIZER}:
        raise CheckpointError(
            f"{path}/{STATE}: step {found.step}, files {sorted(found.files)}; it is damaged"
        )
    return found


def _checksum_of(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def newest(
    folder: Path,
    use: Callable[[Path], T],
    refuse: Callable[[Path, str], None] = lambda path, why: None,
) -> T | None:
    """What `use` makes of the newest checkpoint below `folder` that it does not refuse, if there is one.

    `refuse` is told of those that it refuses with a CheckpointError, and why.
    """
    for path in list_checkpoints(folder):
        try:
            return use(path)
        except CheckpointError as failure:
            refuse(path, str(failure))
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, newest first; unfinished ones are not among them.

    One that was just being replaced when its process ended is.
    """
    if not folder.is_dir():
        return []
    found = {path.name: path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)}
    for path in folder.glob(f"{_OLD}step-*"):
        found.setdefault(_named(path), path)
    return [found[name] for name in sorted(found, reverse=True)]


def _named(path: Path) -> str:
    """The name that a checkpoint has, also while it is being replaced."""
    return path.name.removeprefix(_OLD).partition(".")[0]


def has(folder: Path, step: object) -> bool:
    """Whether there is a checkpoint of that step."""
    return isinstance(step, int) and (folder / _name(step)).is_dir()


def point_to_best(folder: Path, step: int) -> None:
    """Let `best` in `folder` lead to the checkpoint of `step`."""
    aside = folder / f".best.{os.getpid()}"
    with contextlib.suppress(OSError):  # a system without links does without it
        aside.unlink(missing_ok=True)
        aside.symlink_to(_name(step))
        aside.replace(folder / "best")


def prune(folder: Path, step: int, keep_last: int, best: int | None) -> None:
    """Keep the newest `keep_last` up to `step`, and the one of step `best`.

    Later ones were refused when the run resumed; they count for nothing and stay until they are written anew.
    What others are just writing is not touched.
    """
    listed = list_checkpoints(folder)
    whole = [path for path in listed if _named(path) <= _name(step)]
    kept = whole[:keep_last]
    if best is not None:
        kept.append(folder / _name(best))
    replaced = [path for path in folder.glob(f"{_OLD}*") if path not in listed]
    for path in [*whole, *replaced]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
