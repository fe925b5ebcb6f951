"""What a worker process of a sweep runs; rank 0, or the first of an elastic sweep's members, coordinates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.rpc import AnswerThread, LocalClient, RemoteClient
from plait.core.codec import decode
from plait.core.errors import InputError
from plait.core.logs import show_logs
from plait.fusion.errors import FusionError
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.measure.fresh_process import FreshProcesses
from plait.sweeping.array_size import import_fake_tensors
from plait.sweeping.coordinator import Coordinator, check_comparable, choose_metric
from plait.sweeping.datasets import DataSets, check_data
from plait.sweeping.elastic.members import SweepMembers
from plait.sweeping.search.values import Search
from plait.sweeping.settings import SweepSettings
from plait.sweeping.sweep_loop import SweepLoop
from plait.sweeping.trial_settings import check_key, with_values
from plait.sweeping.worker_group import check_worker_groups, make_worker_group
from plait.training import components
from plait.training.checks.data_reads import look_at_data
from plait.training.optimizers.eager import use_eager_optimizers
from plait.training.worker_group import ALONE, WorkerGroup

WAIT_S = 0.05


# Where workers ask the one that keeps the trials.
QUESTIONS = "plait/sweep"


def check_order(order: dict[str, Any]) -> None:
    """Refuse a sweep that cannot run, before any worker starts; each host's agent calls it."""
    use_eager_optimizers()
    settings = decode(SweepSettings, order["settings"], "settings")
    Search(settings)
    check_comparable(settings, choose_metric(settings))
    check_data(settings.train.data)
    components.check(settings.train)
    for dimension in settings.over:
        check_key(dimension.key)
        for value in dimension.samples():
            components.check(with_values(settings.train, {dimension.key: value}))


def sweep(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Be one worker of a sweep; rank 0's answer is its result."""
    show_logs()
    use_eager_optimizers()
    settings = decode(SweepSettings, order["settings"], "settings")
    # Before a device is in use.
    fresh = FreshProcesses(import_fake_tensors) if _measures(settings, worker) else None
    folder = RunDir(Path(order["folder"]))
    device = components.choose_device(settings.train.device, worker.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_worker_groups(settings, worker.world_size)
    group = ALONE
    if settings.workers_per_array > 1:
        worker.join(components.agree_on_backend(worker, components.choose_backend(device)))
        group = make_worker_group(worker, settings, device)
    if worker.memberships is not None or worker.world_size > settings.workers_per_array:
        check_shared(worker.host, folder, order.get("run"))
    try:
        if worker.memberships is None:
            result = _take_part(worker, settings, folder, device, group, fresh, order["resume"])
        else:
            result = _take_part_while_needed(worker, settings, folder, device, fresh, order["resume"])
    except FusionError as failure:
        if settings.train.pipeline is not None:  # stages are fused, whatever the width
            raise
        raise FusionError(f"{failure}\n  or train trials one by one, without fusion: --width 1") from None
    if not group.is_alone:
        group.close()
        dist.destroy_process_group()
    return result


def _measures(settings: SweepSettings, worker: Worker) -> bool:
    """Whether this worker tries out how trials are fused: a width that nobody gave, or for its group."""
    if settings.train.pipeline is not None or settings.width == 1:
        return False
    leads = worker.rank % settings.workers_per_array == 0
    return leads and (settings.width is None or settings.replicas > 1)


def _take_part(
    worker: Worker,
    settings: SweepSettings,
    folder: RunDir,
    device: torch.device,
    group: WorkerGroup,
    fresh: FreshProcesses | None,
    resume: bool,
) -> dict[str, Any]:
    """Train with the others of the group; rank 0 returns the result."""
    sets = DataSets(partial(look_at_data, worker))
    if not group.is_first:
        SweepLoop(worker, settings, folder, None, sets, device, group).run()
        return {}
    groups = worker.world_size // settings.workers_per_array
    coordinator = Coordinator(worker, settings, folder, sets, resume) if worker.rank == 0 else None
    client = RemoteClient(worker.store, QUESTIONS) if coordinator is None else LocalClient(coordinator.answer)
    answers = None
    if isinstance(client, LocalClient) and groups > 1:
        answers = AnswerThread(worker.store, QUESTIONS, client)
    try:
        SweepLoop(worker, settings, folder, client, sets, device, group, fresh=fresh).run()
    except BaseException:
        if coordinator is not None:
            coordinator.flush()
        raise
    if coordinator is None:
        return client.ask(ask="leave")
    # The others may still train; the launcher ends us when one of them fails.
    while coordinator.left < groups - 1:
        time.sleep(WAIT_S)
    if answers is not None:
        answers.close()
    return coordinator.close().to_dict()


def _take_part_while_needed(
    worker: Worker,
    settings: SweepSettings,
    folder: RunDir,
    device: torch.device,
    fresh: FreshProcesses | None,
    resume: bool,
) -> dict[str, Any]:
    """Train until the end of the sweep or until the others go on without this worker.

    All members at the end return the result: whoever coordinates may be lost after it has closed the sweep.
    """
    sets = DataSets(partial(look_at_data, worker))

    def make_coordinator(
        holders: Sequence[int] | None, on_holders: Callable[[Sequence[int]], None]
    ) -> Coordinator:
        return Coordinator(worker, settings, folder, sets, resume, holders, on_holders)

    members = SweepMembers(worker, make_coordinator)
    members.join()
    training = SweepLoop(worker, settings, folder, members, sets, device, members=members, fresh=fresh)
    while True:
        if training.run() != "left" and (result := members.result()) is not None:
            return result
        if members.leave():
            return {}


def check_shared(host: str, folder: RunDir, run: str | None) -> None:
    """Refuse a host that does not see the folder of `run`: trials move between groups as files in it."""
    try:
        found = None if run is None else folder.read_record().id
    except InputError:
        found = ""
    if found != run:
        raise InputError(
            f"run_dir: {host} does not see {folder.path} as the host does that the sweep was started on; a "
            f"sweep over several hosts needs its run folder on a disk they share: set run_dir to one"
        )
