"""Checkpoints: whole or absent, checked before use, by parameter name, never unpickled.

A checkpoint is a folder `step-N` with `model.safetensors`, `optimizer.safetensors`, `sync.safetensors` where
the workers' agreement has state of its own, and `state.json`, which holds the progress, what is not a tensor,
and each file's size and checksum. It is written aside, flushed to disk and renamed. Random numbers need no
state: they are a function of the seed, the step and the rank.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.core.errors import CheckpointError
from plait.core.files import sync_folder, write_atomic
from plait.stages.linear import laid_out_as

VERSION = 1
SYNC_FILE = "sync.safetensors"
log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]


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


def model_state(model: torch.nn.Module) -> Tensors:
    """The model's parameters and buffers by name; a tied one under each of its names."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Tensors:
    """The optimizer's state as `parameter name/key` -> tensor; numbers become scalars."""
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value).detach()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if value is not None
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: Tensors
) -> None:
    """Put what `optimizer_state` returned back, each tensor where the optimizer keeps it."""
    whole = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
    whole["state"] = {}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        if name not in numbers:
            raise CheckpointError(f"the optimizer's state is of another model: it has {name!r}")
        number = numbers[name]
        whole["state"].setdefault(number, {})[key] = laid_out_as(parameters[number], value)
    optimizer.load_state_dict(whole)


def check_optimizer(progress: Mapping[str, Any], kind: str) -> None:
    """Refuse the state of another kind of optimizer."""
    found = progress.get("optimizer")
    if found != kind:
        raise CheckpointError(f"its optimizer is {found!r}, the job's is {kind!r}; resume with the same one")


def load_model_state(model: torch.nn.Module, state: Tensors) -> None:
    """Put `state` into `model`; a difference in names or shapes is told with the first one found."""
    own = model.state_dict()
    for name, value in own.items():
        if name not in state:
            raise CheckpointError(f"it has no {name!r}, which the model has; is it of another model?")
        if state[name].shape != value.shape:
            found, expected = tuple(state[name].shape), tuple(value.shape)
            raise CheckpointError(f"{name!r} has shape {found} there and {expected} in the model")
    if extra := sorted(state.keys() - own.keys()):
        raise CheckpointError(f"it has {extra[0]!r}, which the model has not; is it of another model?")
    model.load_state_dict(state)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` below `folder`, whole or not at all; returns where it is."""
    final = folder / _name(checkpoint.step)
    aside = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model, tied = _without_repeats(checkpoint.model)
    save_file(model, aside / "model.safetensors")
    save_file({k: v.contiguous() for k, v in checkpoint.optimizer.items()}, aside / "optimizer.safetensors")
    if checkpoint.sync:
        # Copied: they may be views of one memory, which such a file does not take.
        save_file({k: v.clone() for k, v in checkpoint.sync.items()}, aside / SYNC_FILE)
    files = {path.name: _seal(path) for path in sorted(aside.glob("*.safetensors"))}
    state = {
        "plait": "checkpoint",
        "version": VERSION,
        "step": checkpoint.step,
        "progress": dict(checkpoint.progress),
        "tied": tied,
        "files": files,
    }
    write_atomic(aside / "state.json", json.dumps(state, indent=1))
    sync_folder(aside)
    old = folder / f".old-{final.name}.{os.getpid()}"
    if final.exists():
        final.rename(old)
    aside.rename(final)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)
    return final


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


def _seal(path: Path) -> dict[str, int]:
    """Flush `path` to disk; its size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "crc32": _checksum(path)}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def load(path: Path) -> Checkpoint:
    """The checkpoint at `path`, checked whole; a truncated, damaged or foreign one is refused."""
    state = _read_state(path)
    for name, seal in state["files"].items():
        _check_file(path / name, seal)
    try:
        model = load_file(path / "model.safetensors")
        optimizer = load_file(path / "optimizer.safetensors")
        sync = load_file(path / SYNC_FILE) if SYNC_FILE in state["files"] else {}
    except (SafetensorError, OSError) as failure:
        raise CheckpointError(f"{path}: cannot be read: {failure}") from None
    model.update({alias: model[name] for alias, name in state["tied"].items()})
    return Checkpoint(state["step"], model, optimizer, state["progress"], sync)


def _check_file(file: Path, seal: Mapping[str, int]) -> None:
    if not file.exists():
        raise CheckpointError(f"{file}: missing")
    size = file.stat().st_size
    if size != seal["bytes"]:
        raise CheckpointError(f"{file}: {size} bytes, expected {seal['bytes']}; it is truncated")
    if _checksum(file) != seal["crc32"]:
        raise CheckpointError(f"{file}: its checksum differs from the one in state.json; it is damaged")


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no state.json in it; it is not a whole checkpoint of Plait's"
        ) from None
    except (OSError, ValueError) as failure:
        raise CheckpointError(f"{path}/state.json: cannot be read: {failure}") from None
    if not isinstance(state, dict) or state.get("plait") != "checkpoint":
        raise CheckpointError(f"{path}/state.json: not a checkpoint of Plait's")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {state.get('version')}, this Plait reads version {VERSION}")
    if missing := {"step", "progress", "tied", "files"} - state.keys():
        raise CheckpointError(f"{path}/state.json: {sorted(missing)[0]!r} is missing; it is damaged")
    return state


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, newest first; unfinished ones are not among them."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def prune(folder: Path, step: int, keep_last: int, best: int | None) -> None:
    """Keep the newest `keep_last` up to `step`, and the one of step `best`; remove what crashes left behind.

    Later ones were refused when the run resumed; they count for nothing and stay until they are written anew.
    """
    whole = [path for path in list_checkpoints(folder) if path.name <= _name(step)]
    kept = whole[:keep_last]
    if best is not None:
        kept.append(folder / _name(best))
    unfinished = [*folder.glob(".step-*"), *folder.glob(".old-*")]
    for path in [*whole, *unfinished]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
