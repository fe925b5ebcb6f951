"""Checkpoints: complete or absent, checked before use, by parameter name, never unpickled.

A checkpoint is a folder `step-N` with `model.safetensors`, `optimizer.safetensors`, `sync.safetensors` if the
sync has state, and `state.json`, which holds the progress, values that are not tensors, and each file's size
and checksum. It is written under a temporary name, flushed to disk and renamed. Random numbers need no state:
they are a function of the seed, the step and the rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from plait.comm.collectives import broadcast_named, broadcast_value
from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError
from plait.core.files import sync_folder, write_atomic, writing
from plait.core.shown import shown
from plait.pipeline.named_state import Tensors, is_packed, model_state, unpacked
from plait.training.stages.tensor_file import StoredTensors, find_broken

T = TypeVar("T")

VERSION = 2
# Version 1 had no checksum of its state.
READ_VERSIONS = (1, VERSION)
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
SYNC = "sync.safetensors"
_OLD = ".old-"
_NAME = re.compile(r"step-\d+")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some step. `model` and `optimizer` are keyed by parameter name.

    So is `sync`, the state of the sync: that of an outer optimizer.
    """

    step: int
    model: Tensors
    optimizer: Tensors
    progress: Mapping[str, Any]
    sync: Tensors = field(default_factory=dict)
    # The files with the tensors, if they were written as they arrived instead of kept in memory.
    written: Written | None = None
    # The file to read tensors from one by one, instead.
    stored: StoredCheckpoint | None = None


@dataclass(frozen=True)
class Written:
    """Files with the tensors of a checkpoint that is being written, and the aliases of tied tensors.

    `broken` is the first tensor that `find_broken` found in them.
    """

    model: Path
    optimizer: Path
    tied: Mapping[str, str]
    broken: str | None = None


@dataclass(frozen=True)
class EngineState:
    """The tensors of a checkpoint, by parameter name; `sync` is the state of the sync."""

    model: Tensors
    optimizer: Tensors
    sync: Tensors = field(default_factory=dict)
    # The files with the tensors, if they were written as they arrived instead of kept in memory.
    written: Written | None = None
    # Descriptions of optimizer state that cannot be saved.
    unsaved: tuple[str, ...] = ()
    # The state of the loss scaler, and the offset of the trial's random stream (its forward passes so far).
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    age: int = 0

    def find_broken(self, weights: Container[str]) -> str | None:
        """The name of a tensor that must not be saved, or None; see `find_broken`."""
        if self.written is not None:
            return self.written.broken
        others = {**self.optimizer, **self.sync}
        return find_broken(self.model, weights) or find_broken(others)

    def discard(self) -> None:
        """Remove the files of `written` that no checkpoint contains."""
        if self.written is not None:
            self.written.model.unlink(missing_ok=True)
            self.written.optimizer.unlink(missing_ok=True)


def check_optimizer(progress: Mapping[str, Any], kind: str) -> None:
    """Refuse the state of another kind of optimizer."""
    saved = progress.get("optimizer")
    if saved != kind:
        raise CheckpointError(f"its optimizer is {saved!r}, the job's is {kind!r}; resume with the same one")


def load_model_state(model: torch.nn.Module, state: Tensors) -> None:
    """Load `state` into `model`; CheckpointError names the first difference in names or shapes."""
    _check_shapes(model_state(model), {n: None if is_packed(t) else tuple(t.shape) for n, t in state.items()})
    model.load_state_dict(unpacked(state))


def _check_shapes(expected: Tensors, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """CheckpointError with the first difference in names or shapes (None: any), if there is one."""
    for name, value in expected.items():
        if name not in shapes:
            raise CheckpointError(f"it has no {name!r}, which the model has; is it of another model?")
        if shapes[name] not in (None, tuple(value.shape)):
            there, here = shapes[name], tuple(value.shape)
            raise CheckpointError(f"{name!r} has shape {there} there and {here} in the model")
    if extra := sorted(shapes.keys() - expected.keys()):
        raise CheckpointError(f"it has {extra[0]!r}, which the model has not; is it of another model?")


def broadcast(
    checkpoint: Checkpoint | None, source: int = 0, group: dist.ProcessGroup | None = None
) -> Checkpoint:
    """Broadcast the checkpoint of rank `source` to all ranks of a group; the others pass None."""
    state = checkpoint or Checkpoint(0, {}, {}, {})
    step, progress = broadcast_value([state.step, dict(state.progress)], source, group)
    tensors = (state.model, state.optimizer, state.sync)
    model, optimizer, sync = (broadcast_named(each, source, group) for each in tensors)
    return Checkpoint(step, model, optimizer, progress, sync)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` below `folder` atomically; returns its path.

    DiskError if writing fails; partial files are removed unless this process is killed. Several processes may
    write at once, even the same step.
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
        # Copied: safetensors files cannot hold views of shared memory.
        _save_tensors({k: v.clone() for k, v in checkpoint.sync.items()}, aside / SYNC)
    files = {path.name: _seal(path) for path in sorted(aside.glob("*.safetensors"))}
    _write_state(aside, _State(checkpoint.step, dict(checkpoint.progress), tied, files))
    sync_folder(aside)


def _write_state(path: Path, state: _State) -> None:
    # Round trip, so that the checksum is of what will be read.
    plain = json.loads(json.dumps({"plait": "checkpoint", "version": VERSION, **asdict(state)}))
    write_atomic(path / STATE, json.dumps({**plain, "crc32": _checksum_of(plain)}, indent=1))


def update_progress(folder: Path, step: int, progress: Mapping[str, Any]) -> None:
    """Replace the progress in the checkpoint of `step` below `folder`."""
    path = folder / _name(step)
    _write_state(path, replace(_read_state(path), progress=dict(progress)))


def _save_tensors(tensors: Tensors, path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as failure:
        # SafetensorError has no errno; the number is in its message.
        match = re.search(r"os error (\d+)", str(failure))
        number = int(match[1]) if match else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from failure


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose tensors are read lazily."""

    step: int
    model: StoredTensors
    optimizer: StoredTensors
    progress: Mapping[str, Any]


def open_stored(path: Path) -> StoredCheckpoint:
    """The checkpoint at `path`, completely checked; its tensors are read lazily."""
    state = _read_state(path)
    for name, seal in state.files.items():
        _check_file(path / name, seal)
    try:
        model, optimizer = StoredTensors(path / MODEL, state.tied), StoredTensors(path / OPTIMIZER)
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure}") from None
    return StoredCheckpoint(state.step, model, optimizer, state.progress)


def load_lazily(path: Path) -> Checkpoint:
    """The checkpoint at `path` for a model on the meta device; its tensors are read later."""
    stored = open_stored(path)
    return Checkpoint(stored.step, {}, {}, stored.progress, stored=stored)


def check_names(model: torch.nn.Module, stored: StoredTensors) -> None:
    """CheckpointError with the first difference in names or shapes, if there is one."""
    _check_shapes(model.state_dict(), {name: stored.shape(name) for name in stored})


def _replace(aside: Path, final: Path) -> None:
    """Rename `aside` to `final`; until then `list_checkpoints` still lists the old `final`."""
    while True:
        old = final.with_name(f"{_OLD}{final.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            final.rename(old)
        try:
            aside.rename(final)
        except OSError as failure:
            # Another process has written one there in between.
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
    """Each tensor once, and the aliases of tied ones: safetensors files hold no shared memory."""
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
    """Flush `path` to disk; returns its size and checksum."""
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
    """The checkpoint at `path`; CheckpointError if it is truncated, damaged or of another program."""
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
        decoded = decode(_State, state, f"{path}/{STATE}")
    except ArtefactError as failure:
        raise CheckpointError(f"{failure}; it is damaged") from None
    if decoded.step < 0 or decoded.files.keys() - {SYNC} != {MODEL, OPTIMIZER}:
        raise CheckpointError(
            f"{path}/{STATE}: step {decoded.step}, files {sorted(decoded.files)}; it is damaged"
        )
    return decoded


def _checksum_of(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def newest(
    folder: Path,
    use: Callable[[Path], T],
    refuse: Callable[[Path, str], None] = lambda path, why: None,
) -> T | None:
    """The result of `use` for the newest checkpoint below `folder` that it accepts; None if there is none.

    `refuse` is called with each path for which `use` raises CheckpointError, and the message.
    """
    for path in list_checkpoints(folder):
        try:
            return use(path)
        except CheckpointError as failure:
            refuse(path, str(failure))
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints below `folder`, newest first.

    Includes one that was being replaced when its process ended.
    """
    if not folder.is_dir():
        return []
    by_name = {path.name: path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)}
    for path in folder.glob(f"{_OLD}step-*"):
        by_name.setdefault(_named(path), path)
    return [by_name[name] for name in sorted(by_name, reverse=True)]


def _named(path: Path) -> str:
    """The name of a checkpoint, also while it is being replaced."""
    return path.name.removeprefix(_OLD).partition(".")[0]


def has(folder: Path, step: object) -> bool:
    """Whether there is a checkpoint of that step."""
    return isinstance(step, int) and (folder / _name(step)).is_dir()


def point_to_best(folder: Path, step: int) -> None:
    """Point the symbolic link `best` in `folder` to the checkpoint of `step`."""
    aside = folder / f".best.{os.getpid()}"
    with contextlib.suppress(OSError):  # not all file systems have links
        aside.unlink(missing_ok=True)
        aside.symlink_to(_name(step))
        aside.replace(folder / "best")


def prune(folder: Path, step: int, keep_last: int, best: int | None) -> None:
    """Remove all checkpoints up to `step` except the newest `keep_last` and that of step `best`.

    Later ones were refused when the run resumed; they are kept until they are overwritten. Checkpoints that
    other processes are writing are not touched.
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
