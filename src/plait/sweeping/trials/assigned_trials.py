"""The trials that the coordinator has assigned to a worker: taken, made ready, returned, or failed."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from plait.adapt.history import SignalHistory
from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.adapt.policy_source import PolicySource
from plait.core.codec import finite
from plait.core.files import write_atomic
from plait.data.requirements import check_continues, data_progress
from plait.launcher.run_dir import RunDir
from plait.schema.settings import TrainSettings
from plait.sweeping.array_engine import JoiningTrial
from plait.sweeping.array_workers import ArrayWorkers
from plait.sweeping.datasets import DataSets
from plait.sweeping.fusable import why_failed
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.running_trial import POINTS, RunningTrial
from plait.sweeping.trials.trial_files import failure_file, newest, save_trial
from plait.training.change.apply import asked_every, policies_of
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.components import build as build_components
from plait.training.fused.trial_norms import TrialNorms
from plait.training.monitoring.required_signals import wants_norms
from plait.training.optimizers.lr_schedule import build_lr_factor
from plait.training.trial import EarlyStopping
from plait.workloads.metrics import find_modes

log = logging.getLogger(__name__)


class AssignedTrials:
    """What the workers of an array and the coordinator say to each other of single trials."""

    def __init__(self, workers: ArrayWorkers, folder: RunDir) -> None:
        self._workers = workers
        self._folder = folder
        # The numbers of those that are assigned to this worker, and whether there may be more.
        self.held: set[int] = set()
        self.may_get_more = True

    def take(self, group: str, count: int, begin: bool) -> list[JoiningTrial]:
        """Up to `count` trials that the coordinator assigns, ready to join."""
        answer = self._workers.ask(
            ask="take", worker=self._workers.worker.id, group=group, count=count, begin=begin
        )
        self.may_get_more = answer["more"]
        self.held.update(assignment["trial"] for assignment in answer["trials"])
        trials = []
        for assignment in answer["trials"]:
            number, why, failed = assignment["trial"], None, None
            state = self._workers.group.checkpoint_of_first(partial(newest, self._folder, number))
            try:
                joining = self._prepare(assignment, state)
            except Exception as failure:  # a user's model can fail in any way
                if (why := why_failed(failure)) is None:
                    raise
                failed = failure
            if (why := self._workers.group.any_of(why)) is not None:
                self.fail(number, why, failed)
                continue
            self.count_goals(joining.trial, assignment["goals"])
            trials.append(joining)
        return trials

    def _prepare(self, assignment: Mapping[str, Any], state: Checkpoint | None) -> JoiningTrial:
        """A trial ready to join, loaded from its checkpoint if it has one."""
        settings = with_values(self._workers.settings.train, assignment["values"])
        entry = make_entry(settings, state, self._workers.device, self._workers.sets)
        train_set, _ = self._workers.sets.of(settings)
        signals, sources = SignalHistory(), []
        if settings.adapt:
            every = asked_every(settings, self._workers.group.size)
            sources.append(PolicySource(policies_of(settings), signals, lambda: every))
        trial = RunningTrial(
            number=assignment["trial"],
            settings=settings,
            drawn=assignment["drawn"],
            schedule=build_lr_factor(settings.lr_schedule, assignment["drawn"][-1]),
            early_stopping=EarlyStopping(settings.early_stop, find_modes(settings.evaluate, settings.loss)),
            weights=entry.components.weights,
            points=0 if self._workers.averages else POINTS,
            sources=sources,
            signals=signals,
            noise=entry.noise,
            data=data_progress(train_set, settings),
        )
        if state is not None:
            trial.load(state.step, state.progress)
            # Trials of a population go on from the states of others.
            if self._workers.settings.search.kind != "pbt":
                check_continues(state.progress, trial.position.sample > 0, train_set, settings)
            trial.load_signals(state.progress)
        return JoiningTrial(trial, entry)

    def count_goals(self, trial: RunningTrial, known: Sequence[int]) -> None:
        """Count the steps to a trial's goals, and report them unless they are `known`."""
        trial.count_goals(self._workers.sets.of(trial.settings)[0].length)
        if list(trial.goals) != list(known):
            goals = list(trial.goals)
            self._workers.ask(ask="goals", worker=self._workers.worker.id, trial=trial.number, goals=goals)

    def note_losses(self, trials: Sequence[RunningTrial]) -> None:
        """Record a point of the learning curve of each trial, and its gradient noise, if it is measured."""
        if not trials:
            return
        losses = [(trial.number, trial.step, finite(trial.take_mean_loss())) for trial in trials]
        signals = []
        for trial in trials:
            noise = trial.noise
            if noise.steps:
                numbers = (noise.noise_scale, noise.variance, noise.squared_norm, noise.note)
                signals.append((trial.number, trial.step, *numbers))
        self._workers.ask(ask="note", losses=losses, signals=signals)

    def save(self, trial: RunningTrial, state: EngineState | None) -> bool:
        """Write a checkpoint on the worker with the state; False if it must not replace the one before."""
        saved: bool = self._workers.group.from_first(lambda: state and save_trial(self._folder, trial, state))
        if saved:
            self._workers.ask(ask="note", saved=[(trial.number, trial.step)])
        return saved

    def is_wanted(self, trial: RunningTrial, result: Mapping[str, Any]) -> bool:
        """Whether the state of a trial with this result is saved: it would be the best so far, say."""
        return bool(self._workers.ask(ask="wanted", trial=trial.number, **result)["wanted"])

    def fail(
        self,
        number: int,
        why: str,
        failure: BaseException | None = None,
        step: int = 0,
        apart: bool = False,
    ) -> None:
        """Record that a trial failed, and save the traceback; `apart`, this worker does so by itself."""
        if self._workers.group.is_first or apart:
            log.warning("trial %d failed: %s", number, why)
        if failure is not None and (self._workers.group.is_first or apart):
            text = "".join(traceback.format_exception(failure))
            write_atomic(failure_file(self._folder, number), text)
        question = {
            "ask": "stop",
            "worker": self._workers.worker.id,
            "trial": number,
            "step": step,
            "state": "failed",
            "metrics": {},
            "train_loss": None,
            "why": why,
        }
        if apart:
            # Trials are assigned to the first worker of the group.
            first = self._workers.worker.memberships.current.members[self._workers.group.first_rank]
            self._workers.worker.ask({**question, "worker": first})
        else:
            self._workers.ask(**question)
        self.held.discard(number)

    def give_back(self, trial: int, step: int = 0) -> None:
        """Return a trial to the coordinator; another array continues from its last checkpoint, at `step`."""
        self._workers.ask(ask="back", worker=self._workers.worker.id, trial=trial, step=step)
        self.held.discard(trial)


def make_entry(
    settings: TrainSettings, state: Checkpoint | None, device: torch.device, sets: DataSets
) -> TrialInit:
    """A trial ready to join, loaded from its checkpoint if it has one."""
    components, noise = build_components(settings, device, sets.of(settings)), GradientAverages()
    if wants_norms(settings):
        components = replace(components, norms=TrialNorms([noise]))
    if state is None:
        return TrialInit(settings, components, noise=noise)
    components.load(state)
    components.scaler.load_state_dict(dict(state.progress["loss_scale"]))
    return TrialInit(settings, components, state.progress.get("age", 0), state.sync, noise)
