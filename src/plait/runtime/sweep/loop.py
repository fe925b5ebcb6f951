"""A worker of a sweep: it fills its array from the book, takes steps, and reports what trials come to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.cluster.worker import Worker
from plait.core.codec import finite
from plait.fusion.verify import Verdict, tell
from plait.runtime import build
from plait.runtime.folder import RunFolder
from plait.runtime.optim import build_lr_factor
from plait.runtime.patience import Patience
from plait.runtime.settings import TrainSettings
from plait.runtime.sweep.array import Array, Entry
from plait.runtime.sweep.data import DataSets
from plait.runtime.sweep.desk import Desk
from plait.runtime.sweep.feeds import Feed, Feeds, next_batches, reseated
from plait.runtime.sweep.led import LedArray, make_array, make_entry, position_of
from plait.runtime.sweep.seat import Seat, newest, save_seat
from plait.runtime.sweep.settings import SweepSettings
from plait.runtime.sweep.team import Team, share_of
from plait.runtime.sweep.trials import is_fusable, with_values
from plait.runtime.sweep.verified import verify_entries
from plait.runtime.sweep.width import choose_width

# How long a worker that could take more waits before it asks again.
POLL_S = 0.1
log = logging.getLogger(__name__)


class SweepLoop:
    """Trains trials on this worker, or on the team it leads, until there are none left or all must stop."""

    def __init__(
        self,
        worker: Worker,
        settings: SweepSettings,
        folder: RunFolder,
        desk: Desk,
        sets: DataSets,
        device: torch.device,
        team: Team | None = None,
    ) -> None:
        self._worker = worker
        self._team = team
        self._settings = settings
        self._folder = folder
        self._desk = desk
        self._sets = sets
        self._device = device
        self._seats: list[Seat] = []
        self._array: Array | None = None
        self._feeds: Feeds | None = None
        self._group = ""
        self._width = 1
        self._widths: dict[str, int] = {}
        self._verdicts: dict[str, Verdict] = {}
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
            self._settle()
            if self._seats:
                self._step()
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
        self._feeds = Feeds(sets[0], self._device.type == "cuda", *share_of(self._team))
        if self._group not in self._widths:
            replicas = self._settings.replicas
            own = math.ceil(found["waiting"] * self._settings.team_size / self._worker.world_size)
            width = self._settings.width if is_fusable(settings) else 1
            self._widths[self._group] = width or self._choose_width(settings, sets, own, replicas)
        self._width = self._widths[self._group]
        self._change([], self._take(self._width, begin=True))
        return bool(self._seats)

    def _choose_width(
        self, settings: TrainSettings, sets: tuple[Any, Any], trials: int, replicas: int
    ) -> int:
        try:
            return choose_width(settings, self._device, sets, trials, replicas)
        except Exception:  # a user's model can fail in any way when fused
            if self._settings.train.verify == "off":
                raise
        entries = [Entry(settings, build.build(settings, self._device, sets)) for _ in range(2)]
        verdict = self._verify(entries)
        if not verdict.is_fused:
            return 1
        return choose_width(settings, self._device, sets, trials, replicas, verdict)

    def _take(self, count: int, begin: bool = False) -> list[tuple[Seat, Entry]]:
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

    def _seat(self, order: Mapping[str, Any], used: list[Feed]) -> tuple[Seat, Entry]:
        """A trial ready to join: from its newest checkpoint where it has one, else from its beginning."""
        settings = with_values(self._settings.train, order["values"])
        state = newest(self._folder, order["trial"])
        position = position_of(state)
        assert self._feeds is not None
        seat = Seat(
            trial=order["trial"],
            settings=settings,
            steps=order["steps"],
            until=order["until"],
            lr_factor=build_lr_factor(settings.lr_schedule, order["steps"]),
            feed=self._feeds.find(settings, position, used),
            position=position,
            patience=Patience(settings.early_stop),
        )
        if state is not None:
            seat.take_up(state.step, state.progress)
        return seat, make_entry(settings, state, self._device, self._sets)

    def _change(self, leaving: Sequence[int], joining: list[tuple[Seat, Entry]]) -> None:
        """Let trials leave the array and others join; an array without trials is gone."""
        if not leaving and not joining:
            return
        self._collect()
        entries = [entry for _, entry in joining]
        if len(leaving) == len(self._seats) and not joining:
            self._dissolve()
        elif self._array is None:
            self._array = self._make_array(entries)
            self._seats = [seat for seat, _ in joining]
        else:
            self._array.change(leaving, entries)
            self._seats = reseated(self._seats, leaving, [seat for seat, _ in joining])
        numbers = [seat.trial for seat in self._seats]
        is_fused = self._array is not None and self._array.is_fused
        self._desk.ask(ask="array", worker=self._worker.rank, trials=numbers, fused=is_fused)

    def _make_array(self, entries: Sequence[Entry]) -> Array:
        in_stages = self._settings.train.pipeline is not None
        fused = in_stages or (self._width > 1 and is_fusable(entries[0].settings))
        verdict = self._verify(entries) if fused and not in_stages else None
        if self._team is None:
            return make_array(entries, fused, None, verdict)
        return LedArray(self._team, entries, fused, verdict)

    def _verify(self, entries: Sequence[Entry]) -> Verdict:
        """How these trials are fused rightly: what the first array of a kind showed, unless asked anew."""
        mode = self._settings.train.verify
        known = self._verdicts.get(self._group)
        if mode == "off" or (known is not None and mode == "first"):
            return known or Verdict()
        verdict = verify_entries(entries, share_of(self._team), known)
        tell(verdict, known.unfused if known is not None else {})
        log.info("verified %d fused trials in %.1f s", len(entries), verdict.seconds)
        self._verdicts[self._group] = verdict
        self._desk.ask(
            ask="verified",
            worker=self._worker.rank,
            trials=len(entries),
            seconds=verdict.seconds,
            unfused=dict(verdict.unfused),
            refused=verdict.refused,
        )
        return verdict

    def _dissolve(self) -> None:
        if self._array is not None:
            self._array.close()
        self._array, self._seats = None, []

    def _step(self) -> None:
        assert self._array is not None
        batches = next_batches([seat.feed for seat in self._seats])
        factors = [seat.lr_factor(seat.step) for seat in self._seats]
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
            notes = [self._note(self._seats[place]) for place in due]
            self._desk_note([note for note in notes if note is not None])
            lost = [place for place in due if self._seats[place].has_diverged]
            leaving = [place for place in lost if self._end(place, "diverged", {})]
            leaving += self._evaluate_and_report([place for place in due if place not in lost])
        for seat in self._seats:
            seat.moved = False
        free = self._width - len(self._seats) + len(leaving)
        if leaving or (free and self._may_get_more and time.monotonic() - self._asked > POLL_S):
            self._change(sorted(leaving), self._take(free))

    def _note(self, seat: Seat) -> tuple[int, int, float | None] | None:
        if not seat.is_note_due:
            return None
        return seat.trial, seat.step, finite(seat.take_mean_loss())

    def _desk_note(
        self, losses: list[tuple[int, int, float | None]], metrics: Sequence[tuple[int, int, Any]] = ()
    ) -> None:
        if losses or metrics:
            self._desk.ask(ask="note", losses=losses, metrics=list(metrics))

    def _evaluate_and_report(self, places: Sequence[int]) -> list[int]:
        """Evaluate, save and report the trials for which it is time; the places of those that leave."""
        assert self._array is not None
        seats = self._seats
        judged = [place for place in places if seats[place].is_evaluation_due or seats[place].has_reached]
        has_test_set = judged and self._sets.of(seats[judged[0]].settings)[1] is not None
        found = self._array.evaluate(judged) if has_test_set else [{} for _ in judged]
        metrics = dict(zip(judged, found))
        points = [(seats[p].trial, seats[p].step, _finite(metrics[p])) for p in judged if metrics[p]]
        self._desk_note([], points)
        leaving = []
        for place in places:
            seat = seats[place]
            if seat.has_reached:
                if self._reach(place, metrics[place]):
                    leaving.append(place)
                continue
            seat.patience.judge(metrics.get(place, {}))
            if seat.patience.is_over():
                self._end(place, "early-stop", metrics[place])
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

    def _is_wanted(self, seat: Seat, result: Mapping[str, Any]) -> bool:
        return bool(self._desk.ask(ask="wanted", trial=seat.trial, **result)["wanted"])

    def _save(self, place: int) -> None:
        assert self._array is not None
        save_seat(self._folder, self._seats[place], self._array.tensors(place))

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
