"""The adapter of a run in PEFT's own files, which PEFT, and what serves models with it, loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.jobs.evaluate import read_settings, read_state
from plait.launcher.run_dir import RunDir
from plait.pipeline.named_state import unpacked
from plait.training.components import build_model, dtype_of


def save_adapter(folder: RunDir) -> Path | None:
    """Write the adapter of a run's newest checkpoint to its folder `adapter`; None if its job has no adapter.

    An adapter that trained in an array, with zeros added to its rank, has its own rank again.
    """
    settings = read_settings(folder)
    if settings.model.lora is None:
        return None
    state = unpacked(read_state(folder, best=False).model)
    model: Any = build_model(replace(settings.model, lora_array=None), settings.seed).to(
        dtype=dtype_of(settings)
    )
    own = model.state_dict()
    model.load_state_dict(
        {name: state[name][tuple(slice(size) for size in tensor.shape)] for name, tensor in own.items()}
    )
    path = folder.path / "adapter"
    model.save_pretrained(path)
    return path
