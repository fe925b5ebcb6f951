"""What a worker process of a sweep runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from plait.core.codec import decode, encode
from plait.core.errors import InputError, JobError
from plait.core.run_events import SyncChosen
from plait.core.shown import shown
from plait.fusion.errors import FusionError
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.measure.fresh_process import FreshProcesses
from plait.schema.settings import SyncSettings
from plait.schema.sync_options import AUTO
from plait.sweeping.array_size import import_fake_tensors
from plait.sweeping.array_workers import ArrayWorkers, check_worker_groups
from plait.sweeping.datasets import DataSets
from plait.sweeping.elastic.members import SweepMembers
from plait.sweeping.engines.array_plans import layout_from
from plait.sweeping.search.compared_by import check_comparable, choose_metric
from plait.sweeping.search.values import Search
from plait.sweeping.settings import SweepRequest, SweepSettings
from plait.sweeping.sweep_loop import SweepLoop
from plait.sweeping.trial_settings import check_key, with_values
from plait.sync.allreduce.autotune import TopologyChosen, remember
from plait.training import components
from plait.training.checks.data_fingerprints import look_at_data
from plait.training.engines.choose_sync import choose_sync
from plait.training.engines.replica_layout import replica_layouts
from plait.training.fused.shared_bases import base_held_once
from plait.training.process import begin_process, use_device

log = logging.getLogger(__name__)


def check_request(order: Mapping[str, Any]) -> None:
    """Refuse a sweep that cannot run, before any worker starts; each host's agent calls it."""
    settings = begin_process(SweepRequest, order).settings
    Search(settings)
    check_comparable(settings, choose_metric(settings))
    components.check(settings.train)
    for dimension in settings.over:
        check_key(dimension.key)
        for value in dimension.samples():
            try:
                components.check(with_values(settings.train, {dimension.key: value}))
            except JobError as failure:
                raise JobError(f"--over {dimension.key}={shown(value)}: {failure}") from None


@base_held_once()
def sweep(worker: Worker, order: Mapping[str, Any]) -> None:
    """Be one worker of a sweep; its result is the coordinator's."""
    request = begin_process(SweepRequest, order)
    settings, folder = request.settings, RunDir(request.folder)
    # Before a device is in use.
    fresh = FreshProcesses(import_fake_tensors) if _measures(settings, worker) else None
    device = use_device(settings.train.device, worker)
    if not worker.memberships.can_change:
        check_worker_groups(settings, worker.world_size)
    if worker.memberships.can_change or worker.world_size > settings.workers_per_array:
        check_shared(worker.host, folder, request.run)
    sets = DataSets(partial(look_at_data, worker))
    members = SweepMembers(worker, settings, device)
    members.join()
    if settings.train.sync.kind == AUTO:
        sync = SyncSettings(_chosen_sync(worker, settings, sets, device))
        settings = replace(settings, train=replace(settings.train, sync=sync))
    if settings.train.topology.name == AUTO and not worker.memberships.can_change and worker.world_size > 1:
        known = worker.ask({"ask": "topologies"})["chosen"]
        remember(decode(tuple[TopologyChosen, ...], known, "chosen"), worker.rendezvous)
    try:
        while (group := members.find_group(settings)) is not None:
            joined = ArrayWorkers(worker, group, settings, sets, device)
            if SweepLoop(joined, folder, members, fresh).run() != "left":
                members.leave_group()
                return
    except FusionError as failure:
        raise FusionError(f"{failure}\n  or train trials one by one, without fusion: --width 1") from None


def _chosen_sync(worker: Worker, settings: SweepSettings, sets: DataSets, device: torch.device) -> str:
    """The sync of all arrays: that of the sweep's record, else measured on all workers, who call it together.

    One worker has nothing to choose.
    """
    if settings.workers_per_array == 1:
        return SyncSettings().kind
    known: str | None = worker.ask({"ask": "sync", "chosen": None})["sync"]
    if known is not None:
        return known
    chosen = _measured_sync(worker, settings, sets, device)
    if worker.rank == 0:
        log.info("sync %s: %s", chosen.sync, chosen.reason)
        worker.ask({"ask": "sync", "chosen": encode(chosen)})
    return chosen.sync


def _measured_sync(
    worker: Worker, settings: SweepSettings, sets: DataSets, device: torch.device
) -> SyncChosen:
    train, size = settings.train, settings.workers_per_array
    built = components.build(train, device, sets.of(train))
    if not train.in_stages:
        return choose_sync(train, built, (worker.rank % size, size))
    # Slow to import, with all that tracing needs.
    from plait.training.engines.choose_pipeline_sync import choose_sync_of_pipelines

    firsts = range(0, worker.world_size, size)
    groups = [replica_layouts(layout_from(first, settings)) for first in firsts]
    return choose_sync_of_pipelines(worker, train, built, groups)


def _measures(settings: SweepSettings, worker: Worker) -> bool:
    """Whether this worker measures widths: if none is given, or for its group."""
    tries = settings.replicas > 1 and not settings.train.in_stages and settings.width != 1
    leads = worker.memberships.can_change or worker.rank % settings.workers_per_array == 0
    return leads and (settings.width is None or tries)


def check_shared(host: str, folder: RunDir, run: str | None) -> None:
    """Refuse a host that does not see the folder of `run`: trials move between groups as files in it."""
    try:
        recorded = None if run is None else folder.read_record().id
    except InputError:
        recorded = ""
    if recorded != run:
        raise InputError(
            f"run_dir: {host} does not see {folder.path} as the host does that the sweep was started on; a "
            f"sweep over several hosts needs its run folder on a disk they share: set run_dir to one"
        )
