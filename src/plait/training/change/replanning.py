"""Plans made anew while a run goes on: for other workers, or because some have become slower or faster."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from plait.adapt.changes import ChangeRequest, PlanChange, Replan, SavedSource
from plait.comm.collectives import broadcast_value
from plait.core.codec import decode, encode
from plait.core.errors import JobError
from plait.core.units import show_bytes
from plait.launch.worker import Worker
from plait.planner import Plan, PlanError
from plait.planner.replan import Replanned, plan_for, replan
from plait.schema.plans.graph import Graph
from plait.schema.settings import TrainSettings
from plait.training.run import Run


def replan_together(worker: Worker, settings: TrainSettings) -> TrainSettings:
    """The settings with a plan for as many workers as there are now: that of rank 0, or one it makes for all.

    Others may have an earlier one, from before they joined.
    """
    found: dict[str, Any] | None = None
    if worker.rank == 0:
        try:
            plan = settings.stages.plan
            if plan.devices_used != worker.world_size:
                plan, graph = plan_and_graph(settings)
                plan = plan_for(plan, graph, [1.0] * worker.world_size)
            found = {"plan": encode(plan), "failure": None}
        except PlanError as failure:
            found = {"plan": None, "failure": str(failure)}
    found = broadcast_value(found, 0)
    if found["failure"] is not None:
        raise JobError(f"parallel.plan: {found['failure']}")
    return settings.with_stages(plan=decode(Plan, found["plan"], "plan"))


def plan_and_graph(settings: TrainSettings) -> tuple[Plan, Graph]:
    """The plan of a run, and what its layers cost."""
    if settings.stages.graph is None:
        raise PlanError("the run does not know what its layers cost, so no other plan can be made")
    return settings.stages.plan, settings.stages.graph


def why_to_move(
    found: Replanned, gain: float, steps_left: int | None, opening_s: float, bytes_per_s: float
) -> str | None:
    """In words, why to change over to the plan that was found; None where that does not pay.

    It takes `opening_s` to open a pipeline, besides what it takes to move layers.
    """
    saved_s = found.before_s - found.step_s
    move_s = opening_s + found.moved_bytes / bytes_per_s
    if saved_s <= 0 or saved_s < gain * found.before_s:
        return None
    if steps_left is not None and saved_s * steps_left <= move_s:
        return None
    return (
        f"a step would take {found.step_s * 1e3:.3g} ms instead of {found.before_s * 1e3:.3g} ms, which pays "
        f"for the move ({show_bytes(found.moved_bytes)}, about {move_s:.2g} s) within "
        f"{max(1, round(move_s / saved_s))} steps"
    )


class Replanning:
    """Answers requests to plan again: the planner runs beside the training, and steps go on meanwhile.

    `source` is where requests come from. What it asks for besides goes through. The first worker plans.
    """

    def __init__(self, run: Run, source: SavedSource) -> None:
        self._run = run
        self._source = source
        # The request that is being answered, the thread, and what it found.
        self._asked: ChangeRequest | None = None
        self._version: int | None = None
        self._planner: threading.Thread | None = None
        self._found: dict[str, Any] = {}

    def next_due(self, step: int) -> int | None:
        return self._source.next_due(step)

    def due(self, step: int) -> Sequence[ChangeRequest]:
        found = []
        if self._asked is not None and self._members_version() != self._version:
            # Asked for by other members: those that have joined know nothing of it.
            self._asked = self._planner = None
        for request in self._source.due(step):
            if not isinstance(request.change, Replan):
                found.append(request)
            elif self._asked is None:
                self._begin(request, request.change)
        return [*found, *self._answers()]

    def state(self) -> Any:
        return self._source.state()

    def load(self, state: Any) -> None:
        self._source.load(state)

    def _begin(self, request: ChangeRequest, asked: Replan) -> None:
        self._asked, self._version = request, self._members_version()
        found = self._found = dict[str, Any]()
        self._planner = threading.Thread(target=self._plan, args=(asked, found), name="plait-planner")
        self._planner.daemon = True
        self._planner.start()

    def _members_version(self) -> int:
        return self._run.worker.memberships.current.version

    def _plan(self, asked: Replan, answer: dict[str, Any]) -> None:
        run = self._run
        try:
            plan, graph = plan_and_graph(run.settings)
            devices = [plan.machines.device(rank) for rank in range(plan.machines.count)]
            speeds = [device.speed / slow for device, slow in zip(devices, asked.slowness)]
            found = replan(plan, graph, speeds)
            left = None if run.total_steps is None else run.total_steps - run.trial.step
            rate = min(level.bytes_per_s for level in plan.machines.levels)
            why = why_to_move(found, asked.gain, left, run.opened_s, rate)
            answer |= {"plan": found.plan if why else None, "why": why}
        except PlanError as failure:
            answer |= {"plan": None, "why": str(failure)}

    def _answers(self) -> list[ChangeRequest]:
        """The change to the plan that was found, once the planner is done and where it pays."""
        asked, planner, answer = self._asked, self._planner, self._found
        if asked is None or planner is None or planner.is_alive():
            return []
        self._asked = self._planner = None
        if answer.get("plan") is None:
            return []
        return [ChangeRequest(PlanChange(answer["plan"]), asked.by, f"{asked.why}: {answer['why']}")]
