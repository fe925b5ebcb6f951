"""Evaluation of a finished run: its model rebuilt from its settings, its weights from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.api.world import choose_device
from plait.core.artefact import read_json
from plait.core.codec import decode
from plait.core.errors import CheckpointError, InputError
from plait.core.names import check_arguments
from plait.data.call_model import evaluation_mode, has_modes
from plait.data.requirements import check_same_data
from plait.launcher.run_dir import RunDir
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training.checks.first_evaluation import try_evaluation
from plait.training.components import Components, build_without_data
from plait.training.components import build as build_components
from plait.training.evaluate import evaluate_parts
from plait.training.setup.data import as_source
from plait.workloads.metrics import NamedMetric

log = logging.getLogger(__name__)


def measure_run(
    folder: RunDir, best: bool = False, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The step and metrics of a run's newest, or best, checkpoint, computed in this process.

    The data set's own `scores`, called with `options`, are among the metrics.
    """
    settings = read_settings(folder)
    state = read_state(folder, best)
    return _measure(_build(folder, settings, options or {}), settings, state, options or {})


def measure_on(
    folder: RunDir, best: bool, dataset: Any, metrics: tuple[NamedMetric, ...] | None
) -> dict[str, float]:
    """Loss and metrics of a run's checkpoint on `dataset`; None stands for its test split, or its metrics."""
    settings = read_settings(folder)
    state = read_state(folder, best)
    device = choose_device(settings.device, 0)
    if dataset is None:
        components = build_components(settings, device)
    else:
        components = build_without_data(settings, device)
        components = replace(components, test_set=as_source(dataset, settings))
    if components.test_set is None:
        raise InputError(f"{folder.path}: its data has no test split; pass a data set to evaluate on")
    check_same_data(state.progress, components.test_set.dataset, settings.data)
    load_state(components, state)
    if metrics is not None:
        components = replace(components, metrics=metrics)
        if not all(metric.is_named for metric in metrics) and (
            why := try_evaluation(components, settings, 0, 1)
        ):
            log.warning("%s", why)
    return evaluate_parts(components, settings)


def read_state(folder: RunDir, best: bool) -> checkpoints.Checkpoint:
    """The newest checkpoint of the run, or its best."""
    return _best(folder) if best else _newest(folder)


def measure_kept(folder: RunDir, options: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """What `measure_run` returns, for every checkpoint that the run has kept, oldest first.

    Checkpoints are by parameter name, so it makes no difference on how many workers or stages one was made.
    """
    settings = read_settings(folder)
    states = _kept(folder)
    components = _build(folder, settings, options or {})
    return [_measure(components, settings, state, options or {}) for state in states]


def _measure(
    components: Components,
    settings: TrainSettings,
    state: checkpoints.Checkpoint,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    assert components.test_set is not None
    check_same_data(state.progress, components.test_set.dataset, settings.data)
    load_state(components, state)
    metrics = evaluate_parts(components, settings)
    scores = getattr(components.test_set.dataset, "scores", None)
    if scores is not None:
        with evaluation_mode(components.model), components.autocast():
            metrics |= scores(components.model, components.device, **options)
    return {"step": state.step, "metrics": metrics}


def load_state(components: Components, state: checkpoints.Checkpoint) -> None:
    """Load a checkpoint for an evaluation; the optimizer's part if that changes the weights for one."""
    checkpoints.load_model_state(components.model, state.model)
    if has_modes(components.optimizer):
        named_state.load_optimizer_state(components.optimizer, components.names, state.optimizer)


def read_settings(folder: RunDir) -> TrainSettings:
    """The settings of the run."""
    if not folder.settings.exists():
        raise InputError(
            f"{folder.path}: no settings.json in it: the run never started, or is a script's (plait run), "
            f"whose model only the script knows"
        )
    settings = decode(TrainSettings, read_json(folder.settings, "settings"), str(folder.settings)).as_run()
    if settings.data.batch_size < 1 or (settings.evaluate.batch_size or 1) < 1:
        raise InputError(f"{folder.settings}: found a batch of no samples; the file is damaged")
    return settings


def _build(folder: RunDir, settings: TrainSettings, options: Mapping[str, Any]) -> Components:
    components = build_components(settings, choose_device(settings.device, 0))
    if components.test_set is None:
        raise InputError(f"{folder.path}: its data has no test split; nothing to measure on")
    scores = getattr(components.test_set.dataset, "scores", None)
    if options and scores is None:
        raise InputError(f"--score: this run has data.kind {settings.data.kind}, which has no scores")
    if scores is not None:
        check_arguments(scores, options, "--score", InputError, positional=2)
    return components


def _kept(folder: RunDir) -> list[checkpoints.Checkpoint]:
    """All complete checkpoints, oldest first."""
    loaded = []
    for path in reversed(checkpoints.list_checkpoints(folder.checkpoints)):
        try:
            loaded.append(checkpoints.load(path))
        except CheckpointError as failure:
            log.warning("checkpoint refused: %s", failure)
    if not loaded:
        raise CheckpointError(f"{folder.path}: no usable checkpoint in it")
    return loaded


def _newest(folder: RunDir) -> checkpoints.Checkpoint:
    refused = list[str]()

    def refuse(path: Path, why: str) -> None:
        log.warning("checkpoint refused, trying the one before it: %s", why)
        refused.append(f"; the newest was refused: {why}")

    checkpoint = checkpoints.newest(folder.checkpoints, checkpoints.load, refuse)
    if checkpoint is None:
        raise CheckpointError(f"{folder.path}: no usable checkpoint in it{refused[0] if refused else ''}")
    return checkpoint


def _best(folder: RunDir) -> checkpoints.Checkpoint:
    best = _newest(folder).progress.get("best")
    if best is None:
        raise CheckpointError(
            f"{folder.path}: it kept no best checkpoint; set checkpoint.keep_best in the job"
        )
    step = best.get("step") if isinstance(best, dict) else None
    if not isinstance(step, int):
        raise CheckpointError(f"{folder.path}: its newest checkpoint has no best one; it is damaged")
    return checkpoints.load(folder.checkpoints / f"step-{step:09d}")
