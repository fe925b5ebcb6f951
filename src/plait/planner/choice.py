"""Choosing between plans that cut the same batch in different ways."""

from __future__ import annotations

from dataclasses import replace

from plait.planner.plan import Plan
from plait.planner.reasons import why_faster


def faster_plan(first: Plan, second: Plan) -> Plan:
    """That of two plans which takes less time for a step, with what the other would take.

    Both must be for the same batch; they may cut it into other numbers of microbatches.
    """
    chosen, other = (first, second) if first.step_s <= second.step_s else (second, first)
    return replace(chosen, why=f"{chosen.why} {why_faster(chosen, other)}")
