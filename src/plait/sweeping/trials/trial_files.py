"""The folders of a sweep's trials: their checkpoints, and the best one's as that of a single run."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

from plait.core.codec import encode
from plait.core.files import write_atomic
from plait.launcher.run_dir import RunDir
from plait.sweeping.trials.running_trial import RunningTrial
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import EngineState


def trial_folder(folder: RunDir, trial: int) -> RunDir:
    """The folder of one trial: that of an ordinary run, below the sweep's."""
    return RunDir(folder.path / "trials" / f"{trial:04d}")


def failure_file(folder: RunDir, trial: int) -> Path:
    """Where the error of a trial that failed is kept, with its frames."""
    return folder.path / "failures" / f"trial-{trial:04d}.txt"


def save_trial(folder: RunDir, trial: RunningTrial, state: EngineState) -> bool:
    """Write the trial's checkpoint into its folder, which is that of an ordinary run; older ones go.

    False where its state holds values that are no numbers: then the checkpoint before stays.
    """
    if state.find_broken(trial.weights) is not None:
        return False
    paths = trial_folder(folder, trial.number)
    write_atomic(paths.settings, json.dumps(encode(trial.settings), indent=1))
    progress = trial.saved(state)
    saved = checkpoints.Checkpoint(trial.step, state.model, state.optimizer, progress, state.sync)
    save_state(folder, trial.number, saved)
    return True


def save_state(folder: RunDir, trial: int, state: checkpoints.Checkpoint) -> None:
    """Make `state` the one checkpoint of a trial."""
    paths = trial_folder(folder, trial)
    checkpoints.save(paths.checkpoints, state)
    checkpoints.prune(paths.checkpoints, state.step, keep_last=1, best=None)


def newest(folder: RunDir, trial: int) -> checkpoints.Checkpoint | None:
    """The newest whole checkpoint of a trial; what is damaged is passed over."""
    return checkpoints.newest(trial_folder(folder, trial).checkpoints, checkpoints.load)


def copy_state(folder: RunDir, winner: int, loser: int) -> None:
    """Copy weights and optimizer state of `winner` to `loser`, which keeps its position in the data."""
    source, target = newest(folder, winner), newest(folder, loser)
    assert source is not None
    # A trial that diverged did not reach the same step: it continues at the position of the winner.
    progress = target.progress if target is not None and target.step == source.step else source.progress
    save_state(folder, loser, replace(source, progress=progress))


def remove(folder: RunDir, trial: int) -> None:
    """Remove the folder of a trial."""
    shutil.rmtree(trial_folder(folder, trial).path, ignore_errors=True)


def publish(folder: RunDir, trial: int, removes: bool) -> None:
    """Copy the settings and the checkpoint of a trial to where a single run has them, or move them."""
    state, paths = newest(folder, trial), trial_folder(folder, trial)
    if state is None:  # published by an earlier part of this sweep
        return
    shutil.copyfile(paths.settings, folder.settings)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    checkpoints.save(folder.checkpoints, state)
    if removes:
        shutil.rmtree(paths.path)
        with contextlib.suppress(OSError):  # it contains other files
            paths.path.parent.rmdir()
