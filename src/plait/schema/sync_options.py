"""The kinds of sync and their options. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from plait.core.codec import decode
from plait.core.errors import ArtefactError, JobError
from plait.core.names import did_you_mean
from plait.core.units import count_of
from plait.schema.limits import Count, CountFromZero, KeyLimits, check_limits

KEY = "parallel.sync_options"


@dataclass(frozen=True)
class AllReduceOptions:
    """Gradients are summed at every step; there are no options."""


@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """A worker that sends no heartbeat for `lease_s` is lost."""

    lease_s: Annotated[float, KeyLimits(ge=0.2)] = 5.0


@dataclass(frozen=True)
class PartialReduceOptions(LeaseOptions):
    """Averages over groups of at least `minimum` workers that are ready; see partial_reduce_rules.Rules.

    With `state`, the optimizer's state is averaged as well as weights and buffers. With `average: gradients`
    a group also averages gradients, and does so before the update, so that the optimizer sees the mean.
    """

    average: Literal["weights", "gradients"] = "weights"
    minimum: Annotated[int, KeyLimits(ge=2)] = 2
    # A share of a step, and steps to wait for a partner.
    window: Annotated[float, KeyLimits(ge=0, le=1)] = 0.1
    patience: Annotated[float, KeyLimits(gt=0)] = 1.0
    every: Count = 10
    state: bool = True


@dataclass(frozen=True)
class AdPsgdOptions(LeaseOptions):
    """A thread averages with a random neighbour on a bipartite `graph` while the worker computes."""

    graph: Literal["complete", "ring"] = "complete"


@dataclass(frozen=True)
class PairSyncOptions:
    """At every step each worker averages with its partner in a random matching."""

    state: bool = False


@dataclass(frozen=True)
class PairAveragingOptions(LeaseOptions):
    """Each worker pulls the model of a random peer and averages it with its own."""


@dataclass(frozen=True)
class SmaOptions:
    """Synchronous model averaging: at every step weights move towards the global mean by `alpha`."""

    alpha: Annotated[float, KeyLimits(gt=0, le=1)] = 0.1


@dataclass(frozen=True)
class LocalSgdOptions:
    """Averages all workers every `every` steps; with `outer: nesterov`, as a step of DiLoCo's optimizer."""

    every: Count = 8
    outer: Literal["none", "nesterov"] = "none"
    outer_lr: Annotated[float, KeyLimits(gt=0)] = 0.7
    outer_momentum: Annotated[float, KeyLimits(ge=0, lt=1)] = 0.9


@dataclass(frozen=True)
class HetPipeOptions:
    """A parameter server on `servers` workers; each worker pushes once in `wave` steps.

    A worker may be `staleness` waves ahead of the slowest. `dedicated` servers do not train.
    """

    servers: Count = 1
    dedicated: bool = False
    staleness: CountFromZero = 0
    wave: Count = 1


Options = (
    AllReduceOptions
    | PartialReduceOptions
    | AdPsgdOptions
    | PairSyncOptions
    | PairAveragingOptions
    | SmaOptions
    | LocalSgdOptions
    | HetPipeOptions
)

KINDS: Mapping[str, type[Options]] = {
    "all-reduce": AllReduceOptions,
    "partial-reduce": PartialReduceOptions,
    "ad-psgd": AdPsgdOptions,
    "pair-sync": PairSyncOptions,
    "pair-averaging": PairAveragingOptions,
    "sma": SmaOptions,
    "local-sgd": LocalSgdOptions,
    "hetpipe": HetPipeOptions,
}

# The sync is chosen by measurement.
AUTO = "auto"
# Syncs under which all workers take the same steps together; under the others, workers may differ.
LOCKSTEP = ("pair-sync", "sma", "local-sgd")
# Syncs whose workers need a process group.
COLLECTIVE = ("sma", "local-sgd", "hetpipe")


def read_options(kind: str, given: Mapping[str, Any], workers: int, one: str = "worker") -> Options:
    """The options of sync `kind`, checked; an error names the key. `auto` has none.

    `workers` average; `one` says what each is.
    """
    if kind == AUTO:
        if given:
            raise JobError(f"{KEY}: found options, but parallel.sync is auto; name the sync they are for")
        return AllReduceOptions()
    if kind not in KINDS:
        raise JobError(f"parallel.sync: found {kind!r}{did_you_mean(kind, [*KINDS, AUTO])}")
    try:
        options = decode(KINDS[kind], dict(given), KEY)
    except ArtefactError as failure:
        raise JobError(f"{failure} (options of {kind})") from None
    check_limits(options, KEY)
    if isinstance(options, PartialReduceOptions) and options.minimum > max(workers, 2):
        among = f"{_to(2, workers)}, of {count_of(workers, one)}"
        raise JobError(f"{KEY}.minimum: found {options.minimum}, expected {among}")
    if isinstance(options, HetPipeOptions) and options.servers > (most := workers - options.dedicated):
        if not most:
            raise JobError(f"{KEY}.dedicated: found true for 1 {one}, which would not train; leave it out")
        among = f"{_to(1, most)}, of {count_of(workers, one)}"
        raise JobError(f"{KEY}.servers: found {options.servers}, expected {among}")
    return options


def _to(least: int, most: int) -> str:
    return f"{least} to {most}" if most > least else str(least)


def options_among(kind: str, given: Mapping[str, Any], workers: int) -> Options:
    """The options for the current number of workers; they were checked when the job started."""
    options = decode(KINDS[kind], dict(given), KEY)
    if not isinstance(options, HetPipeOptions):
        return options
    # A dedicated server needs at least one other worker.
    dedicated = options.dedicated and workers > 1
    return replace(options, dedicated=dedicated, servers=min(options.servers, workers - dedicated))


def lease_of(kind: str, given: Mapping[str, Any]) -> float | None:
    """The heartbeat timeout under a sync that tolerates the loss of a worker; None for other syncs."""
    options = decode(KINDS[kind], dict(given), KEY) if kind in KINDS else None
    return options.lease_s if isinstance(options, LeaseOptions) else None
