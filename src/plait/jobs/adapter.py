"""The adapter of a run in PEFT's own files, which PEFT, and what serves models with it, loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plait.jobs.evaluate import read_settings, read_state
from plait.launcher.run_dir import RunDir
from plait.pipeline.named_state import unpacked
from plait.training.setup.model import build_placed_model, find_model


def save_adapter(folder: RunDir) -> Path | None:
    """Write the adapter of a run's newest checkpoint to its folder `adapter`; None if its job has no adapter.

    An adapter that trained in an array, with zeros added, has its own rank and layers again.
    """
    settings = read_settings(folder)
    if settings.model.adapter is None:
        return None
    state = unpacked(read_state(folder, best=False).model)
    alone = replace(settings, model=replace(settings.model, lora_array=None))
    model: Any
    model, _ = build_placed_model(find_model(alone.model), alone, torch.device("cpu"))
    own = {}
    for name, tensor in model.state_dict().items():
        if name not in state:  # the layer had an adapter of zeros
            path, _, last = name.rpartition(".")
            state[name] = state[f"{path}.base_layer.{last}"]
        own[name] = state[name][tuple(slice(size) for size in tensor.shape)]
    model.load_state_dict(own)
    path = folder.path / "adapter"
    model.save_pretrained(path)
    return path
