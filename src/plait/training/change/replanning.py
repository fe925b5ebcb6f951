"""New plans for a running job: after a change of workers, or because some became slower or faster."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from plait.adapt.changes import ChangeRequest, PlanChange, Replan, SavedSource
from plait.core.codec import decode, encode
from plait.core.errors import JobError
from plait.core.units import show_bytes
from plait.launcher.worker_process import Worker
from plait.planner import Plan, PlanError
from plait.planner.replan import Replanned, plan_for, replan
from plait.schema.plans.graph import Graph
from plait.schema.settings import TrainSettings
from plait.training.engine import ask_rank_0
from plait.training.run import Run


def replan_together(worker: Worker, settings: TrainSettings) -> TrainSettings:
    """The settings with a plan for the current number of workers, which rank 0 has or makes.

    Other workers may have an earlier plan, from before they joined.
    """

    def make() -> dict[str, Any]:
        plan = settings.stages.plan
        try:
            if plan.devices_used != worker.world_size:
                plan = plan_for(*plan_and_graph(settings), [1.0] * worker.world_size)
        except PlanError as failure:
            return {"failure": str(failure)}
        return {"plan": encode(plan)}

    answer = ask_rank_0(worker, make)
    if "failure" in answer:
        raise JobError(f"parallel.plan: {answer['failure']}")
    return settings.with_stages(plan=decode(Plan, answer["plan"], "plan"))


def plan_and_graph(settings: TrainSettings) -> tuple[Plan, Graph]:
    """The plan of a run and its costed graph."""
    if settings.stages.graph is None:
        raise PlanError("the run does not know what its layers cost, so no other plan can be made")
    return settings.stages.plan, settings.stages.graph


def why_to_move(
    replanned: Replanned, gain: float, steps_left: int | None, opening_s: float, bytes_per_s: float
) -> str | None:
    """The reason to switch to the new plan, as text; None if the switch costs more than it saves.

    A switch takes `opening_s` to open the pipeline, plus the time to move layers.
    """
    saved_s = replanned.before_s - replanned.step_s
    move_s = opening_s + replanned.moved_bytes / bytes_per_s
    if saved_s <= 0 or saved_s < gain * replanned.before_s:
        return None
    if steps_left is not None and saved_s * steps_left <= move_s:
        return None
    return (
        f"a step would take {replanned.step_s * 1e3:.3g} ms instead of {replanned.before_s * 1e3:.3g} ms, "
        f"which pays for the move ({show_bytes(replanned.moved_bytes)}, about {move_s:.2g} s) within "
        f"{max(1, round(move_s / saved_s))} steps"
    )


class Replanning:
    """Answers `Replan` requests of `source`: the planner runs in a thread, overlapped with training.

    Other requests of `source` pass through unchanged. Only rank 0 plans.
    """

    def __init__(self, run: Run, source: SavedSource) -> None:
        self._run = run
        self._source = source
        # The request that is being answered, the membership version, the planner thread, and its answer.
        self._pending: tuple[ChangeRequest, int, threading.Thread, dict[str, Any]] | None = None

    def next_due(self, step: int) -> int | None:
        return self._source.next_due(step)

    def due(self, step: int) -> Sequence[ChangeRequest]:
        requests, version = [], self._run.worker.memberships.current.version
        if self._pending is not None and self._pending[1] != version:
            # Requested before a change of members: those that have joined do not know of it.
            self._pending = None
        for request in self._source.due(step):
            if not isinstance(request.change, Replan):
                requests.append(request)
            elif self._pending is None:
                answer = dict[str, Any]()
                planner = threading.Thread(target=self._plan, args=(request.change, answer), daemon=True)
                planner.start()
                self._pending = request, version, planner, answer
        return [*requests, *self._answers()]

    def state(self) -> Any:
        return self._source.state()

    def load(self, state: Any) -> None:
        self._source.load(state)

    def _plan(self, change: Replan, answer: dict[str, Any]) -> None:
        run = self._run
        try:
            plan, graph = plan_and_graph(run.settings)
            devices = [plan.machines.device(rank) for rank in range(plan.machines.count)]
            speeds = [device.speed / slow for device, slow in zip(devices, change.slowness)]
            replanned = replan(plan, graph, speeds)
            left = None if run.total_steps is None else run.total_steps - run.trial.step
            rate = min(level.bytes_per_s for level in plan.machines.levels)
            why = why_to_move(replanned, change.gain, left, run.opened_s, rate)
            answer |= {"plan": replanned.plan if why else None, "why": why}
        except PlanError as failure:
            answer |= {"plan": None, "why": str(failure)}

    def _answers(self) -> list[ChangeRequest]:
        """The change to the new plan, once the planner is done and if it pays."""
        if self._pending is None or self._pending[2].is_alive():
            return []
        (request, _, _, answer), self._pending = self._pending, None
        if answer.get("plan") is None:
            return []
        return [ChangeRequest(PlanChange(answer["plan"]), request.by, f"{request.why}: {answer['why']}")]
