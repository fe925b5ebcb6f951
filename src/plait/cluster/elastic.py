"""Torch's elastic agent over the workers of this host, with our logs, pids and failure reports."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from plait.cluster.agent import Talk
from plait.cluster.hosts import address_of, interface_of
from plait.cluster.tolerance import Tolerance, describe_code
from plait.cluster.worker import PROGRESS_KEY, Failure, Place, enter, lifeline
from plait.core.errors import InputError
from plait.core.names import resolve

END_WORKERS_S = 3
PROGRESS_S = 0.1
LINK_S = 1.0


class RankLogs(LogsSpecs):
    """Each worker's output in `rankN.out` and `rankN.err` of the run's log folder, and shown as it comes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder = Path(self.root_log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        outs = {i: str(folder / f"rank{env['RANK']}.out") for i, env in envs.items()}
        errs = {i: str(folder / f"rank{env['RANK']}.err") for i, env in envs.items()}
        for path in [*outs.values(), *errs.values()]:
            Path(path).touch()
        no_files = dict.fromkeys(envs, os.devnull)
        return LogsDest(outs, errs, outs, errs, no_files, os.devnull, os.devnull)


class HostAgent(LocalElasticAgent):
    """Torch's agent, which tells the supervisor whom it started and afterwards how each of them ended."""

    def __init__(self, talk: Talk, tolerance: Tolerance | None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._talk = talk
        self._tolerance = tolerance

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
        self._talk.say(workers={ranks[local]: pid for local, pid in pids.items()})
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = END_WORKERS_S) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, END_WORKERS_S)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._tolerance is not None:
            ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
            return self._tolerance.look(self._pcontext, ranks)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def endings(self, result: RunResult) -> dict[int, int]:
        """The exit codes of the ranks that ended badly; this agent itself ends the rest by SIGTERM."""
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        processes = getattr(getattr(self._pcontext, "_pc", None), "processes", ())
        for worker in self._worker_group.workers if processes else ():
            code = processes[worker.local_rank].exitcode
            if code:
                codes.setdefault(worker.global_rank, code)
        return codes


def serve(order: dict[str, Any], talk: Talk) -> int:
    """Check the order, meet the other hosts, run the workers to their end; the process's exit status."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="plait-agent-") as folder:
        os.mkfifo(lifeline(folder))
        # Held open until this process ends, however it ends; never written to.
        os.open(lifeline(folder), os.O_RDWR)
        try:
            store = _open_store(order)
            talk.say(ready=[store.host, store.port])
            address, port = talk.hear()["go"]
        except InputError as failure:
            talk.say(refused=str(failure))
            return failure.exit_status
        except EOFError:
            return 1
        talk.watch(Path(folder, "stop").touch)
        index, timeout_s = order["index"], order["link_timeout_s"]
        if index == 0:
            _start(_pass_on_progress, store, talk)
            _start(_watch_hosts, store, order["hosts"], timeout_s, talk)
        else:
            _start(_beat, address, port, index)
            _start(_watch_link, address, port, timeout_s, talk, index)
        return _run_workers(order, talk, folder, address, port)


def _open_store(order: dict[str, Any]) -> dist.TCPStore:
    """The job's store, should this be the first host, on a port that the system chooses."""
    address = address_of(order["nic"], order["host"], alone=order["hosts"] == 1)
    if order["check"]:
        resolve(order["check"], "check")(order["settings"])
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _start(function: Any, *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _run_workers(order: dict[str, Any], talk: Talk, folder: str, address: str, port: int) -> int:
    nic = order["nic"] or interface_of(address_of(None, order["host"], order["hosts"] == 1))
    place = Place(order["host"], address, port, nic, folder, order["threads"], order["timeout_s"])
    tolerance = Tolerance(talk, order["host"], folder) if order["tolerate_loss"] else None
    agent = HostAgent(
        talk,
        tolerance,
        spec=_worker_spec(order, place),
        logs_specs=RankLogs(Path(order["logs"])),
        start_method="forkserver",
        exit_barrier_timeout=order["timeout_s"],
        log_line_prefix_template=f"[{order['host']} ${{rank}}] ",
    )
    try:
        result = agent.run()
    except SignalException:
        return 1
    # The workers are gone: from here on a supervisor that hangs up has nothing left to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if result.is_failed():
        talk.say(failed=[asdict(f) for f in _failures(agent.endings(result), order["host"], folder)])
        return 1
    values = tolerance.kept(result.return_values) if tolerance else result.return_values
    talk.say(done={str(rank): value for rank, value in values.items()})
    return 0


def _worker_spec(order: dict[str, Any], place: Place) -> WorkerSpec:
    rendezvous = RendezvousParameters(
        backend="static",
        endpoint=f"{place.address}:{place.port}",
        run_id="plait",
        min_nodes=order["hosts"],
        max_nodes=order["hosts"],
        rank=order["index"],
        timeout=int(order["timeout_s"]),
    )
    return WorkerSpec(
        role="plait",
        local_world_size=order["slots"],
        entrypoint=enter,
        args=(order["entry"], order["settings"], asdict(place)),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.05,
        master_addr=place.address,
        master_port=place.port,
    )


def _failures(endings: dict[int, int], host: str, folder: str) -> list[Failure]:
    """How workers of this host failed: what they reported, and who ended without a word."""
    reports = [Failure(**json.loads(p.read_text())) for p in sorted(Path(folder).glob("failure-*.json"))]
    told = {report.rank for report in reports}
    silent = {rank: code for rank, code in endings.items() if rank not in told}
    for rank, code in silent.items():
        if code != -signal.SIGTERM:
            reports.append(Failure(rank, host, time.time(), describe_code(code), "", False, 1))
    if all(report.peer_lost for report in reports):
        # Whoever ended by SIGTERM may be the lost peer: a likelier cause than those who tell of the loss.
        before = min((report.time for report in reports), default=time.time()) - 1e-3
        reports += [Failure(rank, host, before, "ended by SIGTERM", "", True, 1) for rank in silent]
    return reports


def _pass_on_progress(store: dist.TCPStore, talk: Talk) -> None:
    told = b""
    while True:
        time.sleep(PROGRESS_S)
        if store.check([PROGRESS_KEY]):
            progress = store.get(PROGRESS_KEY)
            if progress != told:
                told = progress
                talk.say(progress=json.loads(progress))


def _beat(address: str, port: int, index: int) -> None:
    """Let the first host know every second that this one is there."""
    store = dist.TCPStore(address, port, is_master=False)
    while True:
        store.set(f"plait/alive/{index}", str(time.monotonic()))
        time.sleep(LINK_S)


def _watch_hosts(store: dist.TCPStore, hosts: int, timeout_s: float, talk: Talk) -> None:
    """Tell the supervisor when another host has not been heard of for `timeout_s`; the first host's part."""
    heard = {index: (b"", time.monotonic()) for index in range(1, hosts)}
    while True:
        time.sleep(LINK_S)
        for index, (word, since) in heard.items():
            key = f"plait/alive/{index}"
            latest = store.get(key) if store.check([key]) else b""
            if latest != word or not latest:  # before its first word a host may still be starting
                heard[index] = (latest, time.monotonic())
            elif time.monotonic() - since > timeout_s:
                talk.say(lost=timeout_s, host=index)
                return


def _watch_link(address: str, port: int, timeout_s: float, talk: Talk, index: int) -> None:
    """Tell the supervisor when the first host has not been reachable for `timeout_s`; the others' part.

    Either side may be the one that the supervisor can still hear.
    """
    reached = time.monotonic()
    while time.monotonic() - reached < timeout_s:
        started = time.monotonic()
        try:
            socket.create_connection((address, port), timeout=LINK_S).close()
            reached = time.monotonic()
        except OSError:
            pass
        time.sleep(max(0.0, LINK_S - (time.monotonic() - started)))
    talk.say(lost=timeout_s, host=index)
