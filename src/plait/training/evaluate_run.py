"""Evaluation of a finished run: its model rebuilt from its settings, its weights from a checkpoint."""

from __future__ import annotations

import logging
from typing import Any

from plait.core.artefact import read_json
from plait.core.codec import decode
from plait.core.errors import CheckpointError, InputError
from plait.data.requirements import check_same_vocabulary
from plait.launch.run_dir import RunDir
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.evaluate import evaluate_parts

log = logging.getLogger(__name__)


def measure_run(folder: RunDir, best: bool = False) -> dict[str, Any]:
    """The step and metrics of a run's newest, or best, checkpoint, computed in this process."""
    if not folder.settings.exists():
        raise InputError(f"{folder.path}: no settings.json in it: the run never started, nothing to measure")
    settings = decode(TrainSettings, read_json(folder.settings, "settings"), str(folder.settings))
    if settings.data.batch_size < 1 or (settings.evaluate.batch_size or 1) < 1:
        raise InputError(f"{folder.settings}: found a batch of no samples; the file is damaged")
    state = _best(folder) if best else _newest(folder)
    parts = components.build(settings, components.choose_device(settings.device, 0))
    if parts.test_set is None:
        raise InputError(f"{folder.path}: its data has no test split; nothing to measure on")
    check_same_vocabulary(state.progress, parts.test_set.dataset, settings.data.kind)
    checkpoints.load_model_state(parts.model, state.model)
    metrics = evaluate_parts(parts, settings, rank=0, world_size=1)
    # What needs the whole split at once, such as answers of several windows.
    scores = getattr(parts.test_set.dataset, "scores", None)
    if scores is not None:
        metrics |= scores(parts.model, parts.device)
    return {"step": state.step, "metrics": metrics}


def _newest(folder: RunDir) -> checkpoints.Checkpoint:
    refused = ""
    for path in checkpoints.list_checkpoints(folder.checkpoints):
        try:
            return checkpoints.load(path)
        except CheckpointError as failure:
            log.warning("checkpoint refused, trying the one before it: %s", failure)
            refused = refused or f"; the newest was refused: {failure}"
    raise CheckpointError(f"{folder.path}: no usable checkpoint in it{refused}")


def _best(folder: RunDir) -> checkpoints.Checkpoint:
    best = _newest(folder).progress.get("best")
    if best is None:
        raise CheckpointError(
            f"{folder.path}: it kept no best checkpoint; set checkpoint.keep_best in the job"
        )
    step = best.get("step") if isinstance(best, dict) else None
    if not isinstance(step, int):
        raise CheckpointError(f"{folder.path}: its newest checkpoint tells of no best one; it is damaged")
    return checkpoints.load(folder.checkpoints / f"step-{step:09d}")
