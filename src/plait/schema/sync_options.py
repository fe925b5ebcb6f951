"""The kinds of sync and their options. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from plait.core.codec import decode
from plait.core.errors import ArtefactError, JobError
from plait.core.names import did_you_mean

KEY = "parallel.sync_options"


@dataclass(frozen=True)
class AllReduceOptions:
    """Gradients are summed at every step; there are no options."""

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return None


@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """A worker that sends no heartbeat for `lease_s` is lost."""

    lease_s: float = 5.0


@dataclass(frozen=True)
class PartialReduceOptions(LeaseOptions):
    """Averages over groups of at least `minimum` workers that are ready; see partial_reduce_rules.Rules.

    With `state`, the optimizer's state is averaged as well as weights and buffers. With `average: gradients`
    a group also averages gradients, and does so before the update, so that the optimizer sees the mean.
    """

    average: Literal["weights", "gradients"] = "weights"
    minimum: int = 2
    window: float = 0.1
    patience: float = 1.0
    every: int = 10
    state: bool = True

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return _first_failed(
            (
                2 <= self.minimum <= max(workers, 2),
                "minimum",
                self.minimum,
                f"2 to {workers}, the number of workers",
            ),
            (0 <= self.window <= 1, "window", self.window, "a share of a step, 0 to 1"),
            (self.patience > 0, "patience", self.patience, "steps to wait for a partner, more than 0"),
            (self.every >= 1, "every", self.every, "a number of rounds, at least 1"),
            _lease(self.lease_s),
        )


@dataclass(frozen=True)
class AdPsgdOptions(LeaseOptions):
    """A thread averages with a random neighbour on a bipartite `graph` while the worker computes."""

    graph: Literal["complete", "ring"] = "complete"

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return _first_failed(_lease(self.lease_s))


@dataclass(frozen=True)
class PairSyncOptions:
    """At every step each worker averages with its partner in a random matching."""

    state: bool = False

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return None


@dataclass(frozen=True)
class PairAveragingOptions(LeaseOptions):
    """Each worker pulls the model of a random peer and averages it with its own."""

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return _first_failed(_lease(self.lease_s))


@dataclass(frozen=True)
class SmaOptions:
    """Synchronous model averaging: at every step weights move towards the global mean by `alpha`."""

    alpha: float = 0.1

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return _first_failed((0 < self.alpha <= 1, "alpha", self.alpha, "more than 0, at most 1"))


@dataclass(frozen=True)
class LocalSgdOptions:
    """Averages all workers every `every` steps; with `outer: nesterov`, as a step of DiLoCo's optimizer."""

    every: int = 8
    outer: Literal["none", "nesterov"] = "none"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        return _first_failed(
            (self.every >= 1, "every", self.every, "a number of steps, at least 1"),
            (self.outer_lr > 0, "outer_lr", self.outer_lr, "more than 0"),
            (0 <= self.outer_momentum < 1, "outer_momentum", self.outer_momentum, "0 to less than 1"),
        )


@dataclass(frozen=True)
class HetPipeOptions:
    """A parameter server on `servers` workers; each worker pushes once in `wave` steps.

    A worker may be `staleness` waves ahead of the slowest. `dedicated` servers do not train.
    """

    servers: int = 1
    dedicated: bool = False
    staleness: int = 0
    wave: int = 1

    def first_invalid(self, workers: int) -> tuple[str, Any, str] | None:
        most = workers - 1 if self.dedicated else workers
        return _first_failed(
            (1 <= self.servers <= most, "servers", self.servers, f"1 to {most}, of {workers} workers"),
            (self.staleness >= 0, "staleness", self.staleness, "a number of waves, at least 0"),
            (self.wave >= 1, "wave", self.wave, "a number of steps, at least 1"),
        )


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

# Syncs that tolerate the loss of a worker.
FAULT_TOLERANT = ("partial-reduce", "ad-psgd", "pair-averaging")
# Syncs under which all workers take the same steps together; under the others, workers may differ.
LOCKSTEP = ("pair-sync", "sma", "local-sgd")


def read_options(kind: str, given: Mapping[str, Any], workers: int) -> Options:
    """The options of sync `kind`, checked; an error names the key."""
    if kind not in KINDS:
        raise JobError(f"parallel.sync: found {kind!r}{did_you_mean(kind, [*KINDS, 'auto'])}")
    try:
        options = decode(KINDS[kind], dict(given), KEY)
    except ArtefactError as failure:
        raise JobError(f"{failure} (options of {kind})") from None
    if (invalid := options.first_invalid(workers)) is not None:
        name, value, expected = invalid
        raise JobError(f"{KEY}.{name}: found {value!r}, expected {expected}")
    return options


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


def _lease(seconds: float) -> tuple[bool, str, Any, str]:
    return (seconds >= 0.2, "lease_s", seconds, "seconds, at least 0.2")


def _first_failed(*checks: tuple[bool, str, Any, str]) -> tuple[str, Any, str] | None:
    return next(((name, value, expected) for fine, name, value, expected in checks if not fine), None)
