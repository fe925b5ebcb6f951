"""Evaluation of a finished run: its model rebuilt from its settings, its weights from a checkpoint."""

from __future__ import annotations

import json
from typing import Any

from plait.core.codec import decode
from plait.core.errors import CheckpointError
from plait.runtime import build
from plait.runtime import checkpoint as checkpoints
from plait.runtime.evaluate import evaluate
from plait.runtime.folder import RunFolder
from plait.runtime.settings import TrainSettings


def measure_run(folder: RunFolder, best: bool = False) -> dict[str, Any]:
    """The step and metrics of a run's newest, or best, checkpoint, computed in this process."""
    settings = decode(TrainSettings, json.loads(folder.settings.read_text()), str(folder.settings))
    state = _best(folder) if best else _newest(folder)
    device = build.choose_device(settings.device, 0)
    parts = build.build(settings, device)
    checkpoints.load_model_state(parts.model, state.model)
    metrics = evaluate(
        parts.model,
        parts.loss,
        parts.metric,
        parts.test_set,
        batch_size=settings.evaluate.batch_size or settings.data.batch_size,
        rank=0,
        world_size=1,
        device=device,
        dtype=parts.dtype,
        autocast=parts.autocast,
    )
    return {"step": state.step, "metrics": metrics}


def _newest(folder: RunFolder) -> checkpoints.Checkpoint:
    refused = ""
    for path in checkpoints.list_checkpoints(folder.checkpoints):
        try:
            return checkpoints.load(path)
        except CheckpointError as failure:
            refused = refused or f"; the newest was refused: {failure}"
    raise CheckpointError(f"{folder.path}: no usable checkpoint in it{refused}")


def _best(folder: RunFolder) -> checkpoints.Checkpoint:
    best = _newest(folder).progress["best"]
    if best is None:
        raise CheckpointError(
            f"{folder.path}: it kept no best checkpoint; set checkpoint.keep_best in the job"
        )
    return checkpoints.load(folder.checkpoints / f"step-{best['step']:09d}")
