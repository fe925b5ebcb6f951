"""The agent of one host: started through the host's shell, it starts the workers there and watches them.

It exchanges JSON lines with the supervisor over its standard streams and makes no decisions:

    in   `AgentOrder`, then `StartAll`, then possibly `Stop`, `EndWorkers`, questions to the coordinator and
         answers and, in an elastic job, `StartWorker`, `NewMembership`, `Dismissal`; the agent kills its
         workers and ends when the stream ends or, across a network, after too long without a `Beat`
    out  `HostReady` or `Refusal`, the pids and ends of workers, and their reports (see `messages.py`)

It creates no files but the workers' logs, so nothing is left over if it is killed. It imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.comm.running_clock import RunningClock
from plait.comm.store import StoreServer
from plait.core.codec import encode
from plait.core.errors import InputError
from plait.launcher import messages
from plait.launcher.failure_cause import describe_status
from plait.launcher.fork_server import ForkServer, ServerGoneError
from plait.launcher.keepalive import watch_hosts
from plait.launcher.messages import CoordinatorAnswer, CoordinatorQuestion
from plait.launcher.workers.agent_worker import AgentWorker, WorkerOutput
from plait.launcher.workers.message_link import MessageLink
from plait.launcher.workers.worker_output import LogWriter
from plait.schema.hosts import address_of

BEAT_S = 5.0
TICK_S = 0.5
DRAIN_S = 2.0
LAST_COMMAND_S = 20.0


def main() -> None:
    """Serve one supervisor, then end."""
    supervisor = _link_to_supervisor()
    request, more = None, True
    while request is None:
        if not more:
            return
        select.select([supervisor], [], [])
        received, more = supervisor.receive()
        request = next((message for message in received if isinstance(message, messages.AgentOrder)), None)
    placement = request.launch.placement
    os.chdir(request.folder)
    os.environ.update(placement.environment)
    # Libraries read it when they are loaded; some of them ignore torch.set_num_threads.
    threads = choose_threads(
        placement.threads, request.host.slots or request.capacity, len(_cores()), os.environ
    )
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # The iteration order of sets of strings should be the same on all hosts, and in the next run.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # The next step reuses the memory that a step frees: returning pages in between took 4% of the time.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # Some builds of oneDNN write a file for profilers to /tmp in each process.
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
    status = Agent(request, threads, supervisor).run()
    # The store's thread is still running; it ends with the process.
    os._exit(status)


def choose_threads(asked: int | None, slots: int, cores: int, environment: Mapping[str, str]) -> int:
    """The threads of a worker: what the job asks for, else OMP_NUM_THREADS, else its share of the cores."""
    if asked is not None:
        return asked
    # It may be a list with a number for each nesting level.
    variable = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if variable.isdecimal() and int(variable) >= 1:
        return int(variable)
    return max(1, cores // max(1, slots))


def remove_shared_files(pids: Sequence[int], folder: Path = Path("/dev/shm")) -> None:
    """Remove the shared-memory files of processes that have ended.

    torch and CUDA create files for each process that shares GPU memory, with the pid in their names.
    """
    for pid in pids:
        for path in (*folder.glob(f"torch_{pid}_*"), *folder.glob(f"cuda.shm.*.{pid:x}.*")):
            with contextlib.suppress(OSError):
                path.unlink()


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _link_to_supervisor() -> MessageLink:
    """The link over the standard streams, which are replaced before any other process is started."""
    link = MessageLink(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # Only messages go to the real standard output; anything printed here goes to standard error.
    os.dup2(2, 1)
    return link


class Agent:
    """Runs the workers of one host until the job ends; one thread waits for all events."""

    def __init__(self, request: messages.AgentOrder, threads: int, supervisor: MessageLink) -> None:
        self._request = request
        self._launch, self._placement = request.launch, request.launch.placement
        self._threads = threads
        self._supervisor = supervisor
        self._secret = bytes.fromhex(request.secret)
        self._workers: list[AgentWorker] = []
        self._starting: deque[AgentWorker] = deque()
        self._selector = selectors.DefaultSelector()
        self._beat = time.monotonic()
        self._clock = RunningClock(2 * TICK_S)
        self._supervisor_seen_s = self._clock.read()
        self._logs = LogWriter()
        entries = [self._launch.entry, self._launch.coordinator or self._launch.entry]
        modules = [*(entry.partition(":")[0] for entry in entries), *self._launch.preload]
        self._signalled: list[int] = []
        # What is started from here on inherits that these signals are ignored.
        for number in request.signals:
            signal.signal(number, signal.SIG_IGN)
        self._server = ForkServer(modules, request.modules)
        for number in request.signals:
            signal.signal(number, lambda number, _: self._signalled.append(number))
        self._store: StoreServer | None = None
        self._store_address = ""
        self._address = ""

    def run(self) -> int:
        """Serve until the supervisor closes its end or the fork server ends; returns the exit status."""
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._read_supervisor)
        self._selector.register(self._server, selectors.EVENT_READ, self._read_server)
        try:
            if self._launch.check:
                # In a forked process, which has the modules imported.
                self._start(messages.CHECK, None, "check", self._launch)
            else:
                self._get_ready()
            while True:
                self._turn()
        except EOFError:
            return 0
        except ServerGoneError:
            how = describe_status(self._server.process.wait())
            self._supervisor.send(messages.OutputLine(f"the process that workers are forked from has {how}"))
            return 1
        finally:
            for worker in self._workers:
                worker.kill()
            self._server.close()
            remove_shared_files([worker.pid for worker in self._workers if worker.pid is not None])
            self._drain()

    def _turn(self) -> None:
        # Unsent messages are retried soon.
        for key, _ in self._selector.select(0.05 if self._has_unsent() else TICK_S):
            key.data()
        if self._store is not None and not self._store.is_alive():
            raise RuntimeError("the store's thread has ended")
        while self._signalled:
            self._supervisor.send(messages.Signalled(self._signalled.pop()))
        now = time.monotonic()
        if now - self._beat > BEAT_S:
            self._beat = now
            self._supervisor.send(messages.Beat())
        self._check_heartbeats()

    def _has_unsent(self) -> bool:
        """Send as much as possible without blocking; returns whether anything is left."""
        every = [self._supervisor, *(worker.link for worker in self._workers)]
        waiting = [each for each in every if each.unsent_bytes]
        for each in waiting:
            each.flush()
        return any(each.unsent_bytes for each in waiting)

    def _check_heartbeats(self) -> None:
        """Report workers that send no heartbeat; end if the supervisor sends none."""
        now = self._clock.read()
        for worker in self._workers:
            silent_s = now - worker.last_seen_s
            is_silent = silent_s > min(self._placement.heartbeat_timeout_s, worker.lease_s)
            if worker.pid is None or worker.ended or worker.reported_silent or not is_silent:
                continue
            worker.reported_silent = True
            self._supervisor.send(messages.WorkerSilence(worker.rank, silent_s))
        longest_s = self._request.supervisor_timeout_s
        if longest_s is not None and now - self._supervisor_seen_s > longest_s:
            message = f"no sign of life of plait for {longest_s:.0f} s: all workers on this host are ended\n"
            for worker in self._workers:
                worker.outputs[1].keep(message.encode())
            if self._request.if_silent:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(self._request.if_silent, timeout=LAST_COMMAND_S, check=False)
            raise EOFError

    def _get_ready(self) -> None:
        """Find this host's address and, on the first host, open the store."""
        request = self._request
        try:
            self._address = address_of(self._placement.nic, request.host, single_host=request.is_single)
        except InputError as failure:
            self._supervisor.send(messages.Refusal(str(failure)))
            return
        if request.index == 0:
            self._store = StoreServer(self._secret, None if request.is_single else self._address)
        self._supervisor.send(messages.HostReady(self._store.address.text if self._store else ""))

    def _read_supervisor(self) -> None:
        self._supervisor_seen_s = self._clock.read()
        received, more = self._supervisor.receive()
        for message in received:
            match message:
                case messages.StartAll():
                    self._start_all(message.store)
                case messages.StartWorker():
                    self._start_worker(message.rank, message.slot, self._launch.entry, joins=True)
                case CoordinatorQuestion() | CoordinatorAnswer() | messages.CloseCoordinator():
                    self._pass_to_worker(message)
                case messages.Stop() | messages.NewMembership():
                    for worker in self._workers:
                        worker.link.send(message)
                case messages.Dismissal(ranks):
                    for worker in self._workers_of(ranks):
                        worker.link.send(message)
                case messages.EndWorkers(ranks):
                    for worker in self._workers_of(ranks):
                        worker.kill()
        if not more:
            raise EOFError

    def _workers_of(self, ranks: Sequence[int]) -> list[AgentWorker]:
        return [worker for worker in self._workers if worker.rank in ranks]

    def _start_all(self, store: str) -> None:
        """Start the workers and watch the connections between the hosts."""
        request = self._request
        watch_hosts(
            request,
            self._address,
            store,
            self._secret,
            lambda index: self._supervisor.send(messages.UnreachableHost(index)),
        )
        self._store_address = store
        if self._launch.coordinator is not None and request.index == 0:
            self._start_worker(messages.COORDINATOR, 0, self._launch.coordinator)
        for local in range(request.host.slots):
            self._start_worker(request.first_rank + local, local, self._launch.entry)

    def _start_worker(self, rank: int, local: int, entry: str, joins: bool = False) -> None:
        request = messages.WorkerRequest(
            rank=rank,
            local_rank=local,
            membership=None if joins else self._request.membership,
            order=self._request,
            store=self._store_address,
            address=self._address,
            entry=entry,
            threads=self._threads,
        )
        self._start(rank, self._launch.logs, "enter", request)

    def _start(
        self, rank: int, logs: Path | None, function: str, argument: messages.Launch | messages.WorkerRequest
    ) -> None:
        """Start the process that calls that function of `worker_process`."""
        worker = AgentWorker(rank, self._request.host.name, logs, self._logs, self._clock)
        self._workers.append(worker)
        self._starting.append(worker)
        self._server.fork(f"plait.launcher.worker_process:{function}", encode(argument), worker.descriptors())
        worker.close_child_ends()
        self._selector.register(worker.control, selectors.EVENT_READ, lambda: self._read_worker(worker))
        for output in worker.outputs:
            self._selector.register(output.read, selectors.EVENT_READ, lambda o=output: self._pass_on(o))

    def _pass_on(self, output: WorkerOutput) -> None:
        if not output.take(self._supervisor):
            self._selector.unregister(output.read)
            output.close()

    def _read_server(self) -> None:
        for message in self._server.receive():
            if "started" in message:
                self._record_start(self._starting.popleft(), message["started"])
            else:
                worker = next(w for w in self._workers if w.pid == message["ended"])
                self._record_end(worker, message["status"])

    def _record_start(self, worker: AgentWorker, pid: int) -> None:
        worker.pid = pid
        worker.last_seen_s = self._clock.read()
        if worker.rank >= 0 and not self._starting:
            pids = {w.rank: w.pid for w in self._workers if w.rank >= 0 and not w.ended and w.pid}
            self._supervisor.send(messages.WorkerPids(pids))

    def _read_worker(self, worker: AgentWorker) -> None:
        if worker.control.fileno() < 0:  # closed by an earlier event of the same turn
            return
        received, more = worker.link.receive()
        worker.last_seen_s = self._clock.read()
        for message in received:
            if isinstance(message, messages.JoinReport):
                worker.lease_s = self._placement.lease_s or math.inf
            is_asked = isinstance(message, (CoordinatorQuestion, CoordinatorAnswer))
            if not isinstance(message, messages.Beat) and not (is_asked and self._pass_to_worker(message)):
                self._supervisor.send(message)
        if not more:
            self._selector.unregister(worker.control)
            worker.link.close()
            worker.control.close()

    def _pass_to_worker(self, message: messages.JobMessage) -> bool:
        """Send an answer, or a message to the coordinator, to its process; False if it is on another host."""
        rank = message.rank if isinstance(message, CoordinatorAnswer) else messages.COORDINATOR
        here = self._workers_of([rank])
        for worker in here:
            worker.link.send(message)
        return bool(here)

    def _record_end(self, worker: AgentWorker, status: int) -> None:
        # First read the messages that it sent before its end.
        self._read_worker(worker)
        worker.ended = True
        if worker.rank != messages.CHECK:
            self._supervisor.send(messages.WorkerEnd(worker.rank, status))
        elif status:
            self._supervisor.send(messages.CheckFailure())
        else:
            self._get_ready()

    def _drain(self) -> None:
        """Forward the last output of the workers, for `DRAIN_S` at most."""
        end = time.monotonic() + DRAIN_S
        for worker in self._workers:
            for output in worker.outputs:
                while not output.closed and time.monotonic() < end:
                    if self._selector.select(0.05):
                        self._pass_on(output)
        while self._supervisor.unsent_bytes and time.monotonic() < end:
            self._supervisor.flush()
        self._logs.flush(DRAIN_S)


if __name__ == "__main__":
    main()
