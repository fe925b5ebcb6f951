"""A worker of a sweep: it fills its array from the book, takes steps, and reports what trials come to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.comm.rpc import Client
from plait.core.codec import finite
from plait.fusion.errors import FusionError
from plait.fusion.verify import Verdict, tell
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.pipeline.layout import PipelineLayout
from plait.schema.settings import TrainSettings
from plait.sweeping.array_size import choose_width, try_two
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines.batch_streams import BatchStream, BatchStreams, next_batches, reseated
from plait.sweeping.engines.fused import Array, TrialInit
from plait.sweeping.engines.leader import LeaderArray, make_array, make_entry, position_of
from plait.sweeping.engines.verified_arrays import verify_entries
from plait.sweeping.reasons import NotFusedError, fused_work, split_by_kind, why_optimizer
from plait.sweeping.running_trial import RunningTrial, newest, save_seat
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from plait.sweeping.worker_group import WorkerGroup, share_of
from plait.training import components
from plait.training.components import DataPair
from plait.training.early_stopping import EarlyStopping
from plait.training.optimizers.build import build_lr_factor

if TYPE_CHECKING:
    from plait.sweeping.engines.verified_stages import StagesOfTrials

# How long a worker that could take more waits before it asks again.
POLL_S = 0.1
log = logging.getLogger(__name__)


class SweepLoop:
    """Trains trials on this worker, or on the team it leads, until there are none left or all must stop."""

    def __init__(
        self,
        worker: Worker,
        settings: SweepSettings,
        folder: RunDir,
        desk: Client,
        sets: DataSets,
        device: torch.device,
        team: WorkerGroup | None = None,
    ) -> None:
        self._worker = worker
        self._team = team
        self._settings = settings
        self._folder = folder
        self._desk = desk
        self._sets = sets
        self._device = device
        self._seats: list[RunningTrial] = []
        self._array: Array | None = None
        self._feeds: BatchStreams | None = None
        self._group = ""
        self._width = 1
        # How many trials an array of a group holds, and, where that is one, why.
        self._widths: dict[str, tuple[int, str]] = {}
        # What must run trial by trial in arrays of a group.
        self._verdicts: dict[str, Verdict] = {}
        # The layers of each stage that a verification has led to.
        self._stages: dict[str, tuple[tuple[str, ...], ...]] = {}
        # Why trials that wait do not join the array there is, though it has room; and why some never do.
        self._closed = self._apart = ""
        self._may_get_more = True
        self._asked = 0.0
        self._losses: Tensor | None = None
        self._losses_of = 0

    def run(self) -> str:
        """Train until the end; `finished`, or `stopped` with every trial's state saved."""
        while not self._worker.stop_requested():
            if not self._seats and not self._begin():
                if self._is_over():
                    return "finished"
                time.sleep(POLL_S)
                continue
            try:
                self._settle()
                if self._seats:
                    self._step()
            except NotFusedError as failure:
                self._separate(str(failure))
        self._give_back()
        return "stopped"

    def _is_over(self) -> bool:
        return bool(self._desk.ask(ask="look").get("over", False))

    def _begin(self) -> bool:
        """Make an array of trials that wait; whether there were any."""
        found = self._desk.ask(ask="look")
        if "group" not in found:
            return False
        self._group = found["group"]
        settings = with_values(self._settings.train, found["values"])
        sets = self._sets.of(settings)
        self._feeds = BatchStreams(sets[0], self._device.type == "cuda", *share_of(self._team))
        if self._group not in self._widths:
            own = math.ceil(found["waiting"] * self._settings.team_size / self._worker.world_size)
            self._widths[self._group] = self._choose_width(settings, sets, own)
        self._width = self._widths[self._group][0]
        try:
            self._change([], self._take(self._width, begin=True))
        except NotFusedError as failure:
            self._separate(str(failure))
        return bool(self._seats)

    def _choose_width(self, settings: TrainSettings, sets: DataPair, trials: int) -> tuple[int, str]:
        """How many of `trials` like these an array holds, and, where that is one, why."""
        if (why := why_optimizer(settings)) is not None:
            return 1, why
        if self._settings.width == 1:
            return 1, "--width is 1"
        try:
            return self._try_width(settings, sets, trials, None)
        except NotFusedError as failure:
            if self._settings.train.verify == "off":
                return 1, str(failure)
        # Some module may have to run trial by trial.
        entries = [TrialInit(settings, components.build(settings, self._device, sets)) for _ in range(2)]
        try:
            return self._try_width(settings, sets, trials, self._verify(entries))
        except NotFusedError as failure:
            return 1, str(failure)

    def _try_width(
        self, settings: TrainSettings, sets: DataPair, trials: int, verdict: Verdict | None
    ) -> tuple[int, str]:
        width, replicas = self._settings.width, self._settings.replicas
        with fused_work():
            if width is None:
                return choose_width(settings, self._device, sets, trials, replicas, verdict)
            if self._can_only_refuse_here:
                try_two(settings, self._device, sets, replicas, verdict)
        return width, ""

    @property
    def _can_only_refuse_here(self) -> bool:
        """Whether a team's leader must try fusion by itself: later its followers are in the midst of it."""
        return self._team is not None and self._settings.train.pipeline is None

    def _separate(self, why: str) -> None:
        """Train the trials of this group one by one from now on, from their last checkpoints."""
        self._widths[self._group] = 1, why
        self._losses, self._losses_of = None, 0
        for seat in self._seats:
            self._desk.ask(ask="back", trial=seat.trial)
        self._dissolve()
        self._tell_array()

    def _take(self, count: int, begin: bool = False) -> list[tuple[RunningTrial, TrialInit]]:
        self._asked = time.monotonic()
        answer = self._desk.ask(ask="take", group=self._group, count=count, begin=begin)
        self._may_get_more = answer["more"]
        used = [seat.feed for seat in self._seats]
        taken = []
        for order in answer["trials"]:
            seat, entry = self._seat(order, used)
            used.append(seat.feed)
            taken.append((seat, entry))
        return taken

    def _seat(self, order: Mapping[str, Any], used: list[BatchStream]) -> tuple[RunningTrial, TrialInit]:
        """A trial ready to join: from its newest checkpoint where it has one, else from its beginning."""
        settings = with_values(self._settings.train, order["values"])
        state = newest(self._folder, order["trial"])
        position = position_of(state)
        assert self._feeds is not None
        seat = RunningTrial(
            trial=order["trial"],
            settings=settings,
            steps=order["steps"],
            until=order["until"],
            lr_factor=build_lr_factor(settings.lr_schedule, order["steps"]),
            feed=self._feeds.find(settings, position, used),
            position=position,
            patience=EarlyStopping(settings.early_stop),
        )
        if state is not None:
            seat.take_up(state.step, state.progress)
        return seat, make_entry(settings, state, self._device, self._sets)

    def _change(self, leaving: Sequence[int], joining: list[tuple[RunningTrial, TrialInit]]) -> None:
        """Let trials leave the array and others join; an array without trials is gone."""
        if not leaving and not joining:
            return
        self._collect()
        if len(leaving) == len(self._seats) and not joining:
            self._dissolve()
        elif self._array is None:
            joining = self._of_one_kind(joining)
            # Known before the array is made: who could not be fused is given back.
            self._seats = [seat for seat, _ in joining]
            self._array = self._make_array([entry for _, entry in joining])
        else:
            joining = self._admitted(joining)
            if len(leaving) == len(self._seats) and not joining:
                self._dissolve()
            elif leaving or joining:
                with self._fused_work():
                    self._array.change(leaving, [entry for _, entry in joining])
                self._seats = reseated(self._seats, leaving, [seat for seat, _ in joining])
        self._tell_array()

    def _tell_array(self) -> None:
        """Let the record have the trials of the array, whether they are fused, and what is worth saying."""
        numbers = [seat.trial for seat in self._seats]
        is_fused = self._array is not None and self._array.is_fused and len(numbers) > 1
        why = self._closed or self._apart or self._widths[self._group][1]
        self._desk.ask(ask="array", worker=self._worker.rank, trials=numbers, fused=is_fused, why=why)

    def _of_one_kind(
        self, joining: list[tuple[RunningTrial, TrialInit]]
    ) -> list[tuple[RunningTrial, TrialInit]]:
        """Those that can be fused with the first; the others wait for an array of their own."""
        if len(joining) < 2 or self._settings.train.pipeline is not None:
            return joining
        others, self._apart = split_by_kind([entry.parts.model for _, entry in joining])
        if others:
            self._desk.ask(ask="split", trials=[joining[number][0].trial for number in others])
        return [one for number, one in enumerate(joining) if number not in others]

    def _admitted(
        self, joining: list[tuple[RunningTrial, TrialInit]]
    ) -> list[tuple[RunningTrial, TrialInit]]:
        """Those that may join the array: none where its trials have changed in a way that others have not."""
        assert self._array is not None
        try:
            with fused_work():
                self._array.check_entering([entry for _, entry in joining])
        except NotFusedError as failure:
            self._closed = f"others wait until it has ended: {failure}"
            for seat, _ in joining:
                self._desk.ask(ask="back", trial=seat.trial)
            return []
        return joining

    def _fused_work(self) -> AbstractContextManager[None]:
        """Around what an array computes: what stops fused trials lets them be trained one by one.

        Not those of a team, whose followers are in the midst of the same.
        """
        can_separate = self._team is None and self._width > 1
        return fused_work() if can_separate else nullcontext()

    def _make_array(self, entries: Sequence[TrialInit]) -> Array:
        if self._team is not None and self._team.pipeline is not None:
            stages, found = self._verify_in_stages(entries, self._team.pipeline.arrangement)
            return LeaderArray(self._team, entries, True, found, stages)
        fused = self._width > 1
        verdict = self._verify(entries) if fused else None
        with self._fused_work():
            if self._team is not None:
                return LeaderArray(self._team, entries, fused, verdict)
            return make_array(entries, fused, None, verdict)

    def _verify_in_stages(
        self, entries: Sequence[TrialInit], arrangement: PipelineLayout
    ) -> tuple[StagesOfTrials, Verdict]:
        """The stages of these trials, and how they are fused rightly; see `_verify`.

        Where they are not, raises NotFusedError for several trials, and for one that stages cannot train it.
        """
        from plait.sweeping.engines.verified_stages import prepare_trials, verify_stages

        known = self._verdicts.get(self._group)
        is_due = self._is_verification_due(known)
        planned = replace(arrangement, stages=self._stages.get(self._group, arrangement.stages))
        stages = prepare_trials(entries, planned, verify=is_due)
        for note in stages.checked.notes:
            log.warning("verify: %s", note)
        if not is_due:
            return stages, known or Verdict()
        verdict = verify_stages(entries, stages, known)
        if verdict.refused is not None and len(entries) == 1:
            raise FusionError(
                f"parallel.plan: the stages do not compute what the model computes: {verdict.refused}; cut "
                f"elsewhere (another number of stages), or sweep without a plan"
            )
        self._stages[self._group] = stages.checked.fine
        self._keep(replace(verdict, seconds=verdict.seconds + stages.checked.seconds), known, len(entries))
        return stages, verdict

    def _is_verification_due(self, known: Verdict | None) -> bool:
        mode = self._settings.train.verify
        return mode != "off" and (known is None or mode != "first")

    def _verify(self, entries: Sequence[TrialInit]) -> Verdict:
        """How these trials are fused rightly: what the first array of a kind showed, unless asked anew.

        Raises NotFusedError where they are not fused at all.
        """
        known = self._verdicts.get(self._group)
        if not self._is_verification_due(known):
            return known or Verdict()
        verdict = verify_entries(entries, share_of(self._team), known)
        self._keep(verdict, known, len(entries))
        return verdict

    def _keep(self, verdict: Verdict, known: Verdict | None, trials: int) -> None:
        """Tell of a verdict, and keep it for arrays to come; raises NotFusedError where it is a refusal."""
        tell(verdict, known.unfused if known is not None else {})
        log.info("verified %d fused trials in %.1f s", trials, verdict.seconds)
        self._desk.ask(
            ask="verified",
            worker=self._worker.rank,
            trials=trials,
            seconds=verdict.seconds,
            unfused=dict(verdict.unfused),
            refused=verdict.refused,
        )
        if verdict.refused is not None:
            raise NotFusedError(verdict.refused)
        self._verdicts[self._group] = verdict

    def _dissolve(self) -> None:
        if self._array is not None:
            self._array.close()
        self._array, self._seats = None, []
        self._closed = self._apart = ""

    def _step(self) -> None:
        assert self._array is not None
        batches = next_batches([seat.feed for seat in self._seats])
        factors = [seat.lr_factor(seat.step) for seat in self._seats]
        with self._fused_work():
            losses = self._array.step(batches, factors)
        # Added up where they are: nobody waits for the device to tell.
        self._losses = losses if self._losses is None else self._losses + losses
        self._losses_of += 1
        for seat, batch in zip(self._seats, batches):
            seat.step += 1
            seat.moved = True
            seat.position = batch.after

    def _collect(self) -> None:
        """Give the losses since the last time to the trials they belong to."""
        if self._losses is not None:
            for seat, loss in zip(self._seats, self._losses.tolist()):
                seat.add_losses(loss, self._losses_of)
        self._losses, self._losses_of = None, 0

    def _settle(self) -> None:
        """What is due after a step: notes, evaluations, checkpoints, reports; then fill empty places."""
        due = [place for place, seat in enumerate(self._seats) if seat.is_due()]
        leaving: list[int] = []
        if due:
            self._collect()
            signals = self._signals([place for place in due if self._seats[place].is_note_due])
            notes = [self._note(self._seats[place]) for place in due]
            self._desk_note([note for note in notes if note is not None], signals=signals)
            lost = [place for place in due if self._seats[place].has_diverged]
            leaving = [place for place in lost if self._end(place, "diverged", {})]
            leaving += self._evaluate_and_report([place for place in due if place not in lost])
        for seat in self._seats:
            seat.moved = False
        free = self._width - len(self._seats) + len(leaving)
        if self._closed:
            free = 0
        if leaving or (free and self._may_get_more and time.monotonic() - self._asked > POLL_S):
            self._change(sorted(leaving), self._take(free) if free else [])

    def _note(self, seat: RunningTrial) -> tuple[int, int, float | None] | None:
        if not seat.is_note_due:
            return None
        return seat.trial, seat.step, finite(seat.take_mean_loss())

    def _signals(self, places: Sequence[int]) -> list[tuple[Any, ...]]:
        """What is known of the gradients of the trials at `places`, where the job asks for it."""
        assert self._array is not None
        found = []
        for place in places:
            noise, seat = self._array.noise(place), self._seats[place]
            if noise is not None and noise.steps:
                numbers = (noise.noise_scale, noise.variance, noise.squared_norm, noise.note)
                found.append((seat.trial, seat.step, *numbers))
        return found

    def _desk_note(
        self,
        losses: list[tuple[int, int, float | None]],
        metrics: Sequence[tuple[int, int, Any]] = (),
        signals: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        if losses or metrics:
            self._desk.ask(ask="note", losses=losses, metrics=list(metrics), signals=list(signals))

    def _evaluate_and_report(self, places: Sequence[int]) -> list[int]:
        """Evaluate, save and report the trials for which it is time; the places of those that leave."""
        assert self._array is not None
        seats = self._seats
        judged = [place for place in places if seats[place].is_evaluated]
        has_test_set = judged and self._sets.of(seats[judged[0]].settings)[1] is not None
        with self._fused_work():
            found = self._array.evaluate(judged) if has_test_set else [{} for _ in judged]
        metrics = dict(zip(judged, found))
        points = [(seats[p].trial, seats[p].step, _finite(metrics[p])) for p in judged if metrics[p]]
        self._desk_note([], points)
        leaving = []
        for place in places:
            seat = seats[place]
            if seat.is_evaluation_due:
                seat.patience.update(metrics[place])
            if seat.is_out_of_patience:
                self._end(place, "early-stop", metrics[place])
                leaving.append(place)
            elif seat.has_reached and self._reach(place, metrics[place]):
                leaving.append(place)
            elif seat.is_checkpoint_due:
                self._save(place)
        return leaving

    def _reach(self, place: int, metrics: dict[str, float]) -> bool:
        """Report a trial at its goal; whether it leaves the array."""
        seat = self._seats[place]
        result = {"metrics": _finite(metrics), "train_loss": _finite_or_none(seat.latest_loss)}
        # One that waits for others goes on from its checkpoint; one that ended is kept if it is the best.
        waits = self._settings.search.kind in ("halving", "pbt")
        if self._is_wanted(seat, result) if seat.step >= seat.steps else waits:
            self._save(place)
        seat.until = self._desk.ask(ask="report", trial=seat.trial, step=seat.step, **result)["until"]
        return seat.until == 0

    def _end(self, place: int, state: str, metrics: dict[str, float]) -> bool:
        """Report a trial that ended by itself."""
        seat = self._seats[place]
        result = {"metrics": _finite(metrics), "train_loss": _finite_or_none(seat.latest_loss)}
        if state != "diverged" and self._is_wanted(seat, result):
            self._save(place)
        self._desk.ask(ask="stop", trial=seat.trial, step=seat.step, state=state, **result)
        return True

    def _is_wanted(self, seat: RunningTrial, result: Mapping[str, Any]) -> bool:
        return bool(self._desk.ask(ask="wanted", trial=seat.trial, **result)["wanted"])

    def _save(self, place: int) -> None:
        assert self._array is not None
        with self._fused_work():
            tensors = self._array.tensors(place)
        save_seat(self._folder, self._seats[place], tensors)

    def _give_back(self) -> None:
        """Save every trial of the array, for whoever goes on with it."""
        self._collect()
        for place, seat in enumerate(self._seats):
            self._save(place)
            self._desk.ask(ask="back", trial=seat.trial)
        self._dissolve()


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in metrics.items()}


def _finite_or_none(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
