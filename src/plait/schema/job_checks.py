"""Checks of combinations of keys; each error says which key to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from plait.core.errors import JobError
from plait.core.names import did_you_mean
from plait.core.shown import shortened, shown
from plait.schema.hosts import MAX_SLOTS
from plait.schema.limits import MAX_COUNT, MAX_SECONDS
from plait.schema.placement import ElasticRules
from plait.schema.settings import PlanRequest
from plait.schema.sync_options import AUTO, KINDS, read_options
from plait.schema.topology_spec import check_topology

if TYPE_CHECKING:
    from plait.schema.job_settings import Job


def check_combinations(job: Job) -> None:
    """Raise JobError for combinations of keys that cannot work together."""
    if (job.epochs is None) == (job.steps is None):
        given = "neither" if job.epochs is None else f"epochs: {job.epochs} and steps: {job.steps}"
        raise JobError(f"epochs: found {given}, expected one of epochs and steps")
    _check_cluster(job)
    slots = job.placement.workers
    knows_hosts = job.taken or job.listed
    if knows_hosts and job.parallel.workers not in (None, slots) and not job.parallel.elastic:
        raise JobError(
            f"parallel.workers: found {job.parallel.workers}, but {_hosts_key(job)} have {slots}; "
            f"make them equal or leave one out"
        )
    # In one chain of stages every worker sees every sample.
    if job.data.batch_size < slots and job.parallel.plan != "model-parallel":
        raise JobError(
            f"data.batch_size: found {job.data.batch_size} for {slots} workers; "
            f"expected at least one sample a worker: a batch of {slots} or more, or fewer workers"
        )
    _check_numbers(job.optimizer.options, "optimizer")
    for number, group in enumerate(job.optimizer.groups):
        _check_numbers(group.options, f"optimizer.groups[{number}]")
    _check_numbers(job.lr_schedule.options, "lr_schedule")
    _check_numbers(job.parallel.sync_options, "parallel.sync_options")
    for number, policy in enumerate(job.adapt):
        _check_numbers(policy.options, f"adapt[{number}]")
    _check_plan(job)
    _check_sync(job, slots)
    _check_topology(job, slots)
    _check_elastic(job, slots)
    _check_policies(job)
    if job.early_stop is not None and job.evaluate.every_steps is None:
        raise JobError("early_stop: needs evaluations; add evaluate.every_steps")


def check_joined(job: Job, launcher: str) -> None:
    """Raise JobError if the job cannot run on workers that `launcher` starts."""
    if job.parallel.elastic:
        raise JobError(
            f"parallel.elastic: found true, but {launcher} decides which workers there are; start the job "
            "with plait train, or leave it out (a restarted job goes on from its checkpoints)"
        )
    if job.parallel.plan == "auto":
        raise JobError(
            f"parallel.plan: found 'auto', which measures on workers that Plait itself starts, not on those "
            f"of {launcher}; make a plan first (plait profile, plait plan) and name its file"
        )


# The overrides by which a job runs on workers of this machine, or on those that another launcher starts.
ON_THIS_HOST: tuple[tuple[str, Any], ...] = (
    ("cluster.hosts", []),
    ("cluster.on", None),
    ("cluster.nodes", None),
    ("cluster.slots", None),
    ("cluster.options", {}),
)


def _hosts_key(job: Job) -> str:
    return "cluster.hosts" if job.listed else "the hosts that were provided"


def _check_cluster(job: Job) -> None:
    """Raise JobError for keys of `cluster` that do not belong to the engine."""
    cluster, engine, (fewest, most) = job.cluster, job.engine, job.node_range
    listed = len(job.listed)
    if engine == "ssh" and not listed:
        raise JobError("cluster.on: found 'ssh', but no hosts; list them with -H w0:2,w1:2 or cluster.hosts")
    if engine != "ssh" and listed:
        where = "this machine alone" if engine == "local" else f"hosts that {engine.capitalize()} chooses"
        raise JobError(
            f"cluster.hosts: found {listed} with cluster.on: {engine}, which means {where}; leave one of "
            f"them out, or say how many there are with cluster.nodes"
        )
    for key in ("nodes", "slots"):
        if engine == "local" and getattr(cluster, key) is not None:
            raise JobError(
                f"cluster.{key}: found {shown(getattr(cluster, key))}, but the job runs on this machine; say "
                f"where its hosts come from with --on (ssh, slurm or ray), or use parallel.workers"
            )
    if cluster.options and engine in ("local", "ssh"):
        raise JobError(
            f"cluster.options: found {shown(min(map(str, cluster.options)))}, which is passed on to Slurm or "
            f"Ray, but cluster.on is {engine}; leave it out, or set --on"
        )
    if fewest > most:
        raise JobError(f"cluster.nodes: found {shown(cluster.nodes)}, expected the fewest first, as in 1:4")
    if listed and fewest > listed:
        raise JobError(
            f"cluster.nodes: found {shown(cluster.nodes)}, but cluster.hosts has {listed}; list more hosts, "
            f"or ask for fewer"
        )
    _check_numbers(dict(cluster.options), "cluster.options")


def _check_plan(job: Job) -> None:
    parallel = job.parallel
    names = ["data-parallel", "model-parallel", "auto"]
    if parallel.plan not in names and not parallel.plan.endswith(".json"):
        raise JobError(
            f"parallel.plan: found {shown(parallel.plan)}, expected auto, data-parallel, model-parallel "
            f"or a plan file (.json){did_you_mean(parallel.plan, names)}"
        )
    overrides = {each.name for each in fields(PlanRequest)} - {"plan"}
    if parallel.plan == "data-parallel" and (extra := overrides & _given(job)):
        raise JobError(
            f"parallel.{min(extra)}: belongs to a pipeline, but parallel.plan is data-parallel; "
            f"use plan: auto, or a plan file"
        )


def _check_sync(job: Job, workers: int) -> None:
    parallel = job.parallel
    # The number of pipeline replicas is only known once there is a plan.
    limit = workers if parallel.plan == "data-parallel" else MAX_SLOTS
    read_options(parallel.sync, parallel.sync_options, limit)
    if parallel.sync_options.get("average") == "gradients" and job.precision == "fp16":
        raise JobError(
            "parallel.sync_options.average: found 'gradients' with precision fp16, which scales them "
            "differently on each worker; use bf16 or float32, or average: weights"
        )
    if parallel.plan == "data-parallel" or workers > 1:
        check_slow(parallel.slow, workers)
    if parallel.jitter is not None and not (
        0 <= parallel.jitter[0] <= 1 and 0 <= parallel.jitter[1] <= MAX_SECONDS
    ):
        raise JobError(
            f"parallel.jitter: found {list(parallel.jitter)}, expected a probability from 0 to 1 and "
            f"seconds, such as [0.1, 0.5]"
        )


def _check_topology(job: Job, workers: int) -> None:
    parallel, spec = job.parallel, job.topology
    if "topology" in _given(job) and parallel.sync != "all-reduce":
        raise JobError(
            f"parallel.topology: belongs to an all-reduce, but parallel.sync is {parallel.sync!r}; "
            f"leave it out, or use sync: all-reduce"
        )
    if not spec.by_name and parallel.plan != "data-parallel":
        raise JobError(
            f"parallel.topology: found {shown(spec.name)} with parallel.plan {shown(parallel.plan)}; the "
            f"replicas of each stage need a separate topology: use a name, or plan: data-parallel"
        )
    if not spec.graphs:  # in a sweep they are for the workers of an array
        check_topology(spec, workers)


def _check_policies(job: Job) -> None:
    parallel = job.parallel
    if any(policy.kind == "plan" for policy in job.adapt) and parallel.plan == "data-parallel":
        raise JobError(
            "adapt.kind: found plan, but every worker holds the whole model; set parallel.plan: auto, or "
            "leave the policy out"
        )
    if any(policy.kind == "plan" for policy in job.adapt) and parallel.sync != "all-reduce":
        raise JobError(
            f"adapt.kind: found plan with parallel.sync {shown(parallel.sync)}; layers move in one pipeline: "
            f"use sync: all-reduce"
        )


def _check_elastic(job: Job, workers: int) -> None:
    parallel, rules = job.parallel, job.placement.elastic
    if rules is None:
        if extra := {each.name for each in fields(ElasticRules)} & _given(job):
            raise JobError(f"parallel.{min(extra)}: applies to elastic jobs only; add parallel.elastic: true")
        return
    if parallel.plan != "data-parallel" and parallel.sync == AUTO:
        raise JobError(
            f"parallel.sync: found 'auto' with parallel.elastic and parallel.plan {shown(parallel.plan)}; "
            f"under all-reduce other workers mean other stages, and pipelines side by side keep theirs: name "
            f"one of {', '.join(KINDS)}"
        )
    for key in ("depths", "recompute"):
        if parallel.plan != "data-parallel" and parallel.sync == "all-reduce" and getattr(parallel, key):
            raise JobError(
                f"parallel.{key}: found {shown(getattr(parallel, key))} with parallel.elastic, where other "
                f"workers mean other stages than those it names; leave it out"
            )
    if not job.topology.by_name:
        raise JobError(
            f"parallel.topology: found {shown(parallel.topology)} with parallel.elastic, whose number of "
            f"workers changes; expected a topology by name"
        )
    if not rules.min_workers <= workers <= rules.max_allowed:
        raise JobError(
            f"parallel.workers: found {workers}, expected parallel.min_workers ({rules.min_workers}) to "
            f"parallel.max_workers ({rules.max_allowed})"
        )
    if rules.max_allowed > job.data.batch_size:
        raise JobError(
            f"parallel.max_workers: found {rules.max_allowed} for batches of {job.data.batch_size}; "
            f"expected at least one sample a worker"
        )


def _given(job: Job) -> set[str]:
    """The keys of `parallel` that the job sets, even if to their defaults."""
    return set(job.content.get("parallel", {}))


def check_slow(slow: Mapping[int, float], workers: int) -> None:
    """Raise JobError for a rank that does not exist, or a factor below 1."""
    for rank, factor in slow.items():
        if not (0 <= rank < workers and 1 <= factor <= MAX_SECONDS):
            raise JobError(
                f"parallel.slow: found {shown(rank)}: {factor}, expected a worker from 0 to {workers - 1} "
                f"and how many times slower it is, at least 1, such as {{1: 4}}"
            )


def _check_numbers(value: Any, path: str) -> None:
    """Raise JobError for numbers in `value` that are not finite, or integers beyond 2**53."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        _check_numbers(each, f"{path}.{shortened(str(key))}")
    if isinstance(value, float) and not math.isfinite(value):
        raise JobError(f"{path}: found {value}, expected a finite number")
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise JobError(f"{path}: found {shown(value)}, expected a whole number up to 2**53")
