"""Weights that stages share: which stage counts them, which have a copy, and whose gradients wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait.planner.schedules.in_flight import Schedule, in_flight
from plait.schema.plans.graph import Tie
from plait.schema.plans.plan import Layout, Stage, Tied


def find_tied(
    ties: Iterable[Tie], stages: Sequence[Sequence[str]], layout: Layout, depths: Sequence[int] = ()
) -> list[Tied]:
    """The share of each of `stages`, given by their layers, in `ties`; `depths` are microbatches in flight.

    A worker with several stages that share a weight holds it once, for the first of them.
    """
    # The depths under stash; under other schedules no gradients wait.
    many = max([layout.devices_from(0), *depths]) * len(layout.workers)
    given = dict(enumerate(depths))
    deep = [in_flight(Schedule.STASH, layout, s, many, given) for s in range(len(stages))]
    tied = [Tied()] * len(stages)
    for tie in ties:
        users = [s for s, layers in enumerate(stages) if not set(tie.nodes).isdisjoint(layers)]
        if len(users) < 2:
            continue
        holders: set[int] = set()
        for s in users:
            if holders.isdisjoint(layout.stages[s]):
                copied = 0.0 if tie.nodes[0] in stages[s] else tie.bytes
                tied[s] = replace(
                    tied[s],
                    shared_bytes=tied[s].shared_bytes + tie.bytes,
                    copied_bytes=tied[s].copied_bytes + copied,
                    waiting_bytes=tied[s].waiting_bytes + tie.bytes * max(0, deep[users[0]] - deep[s]),
                )
            holders |= set(layout.stages[s])
    return tied


def update_together(ties: Iterable[Tie], stages: Sequence[Stage]) -> bool:
    """Whether stash updates each shared weight at one time in all its stages: they have equal replicas."""
    return all(
        len({stage.replicas for stage in stages if not set(tie.nodes).isdisjoint(stage.layers)}) == 1
        for tie in ties
    )
