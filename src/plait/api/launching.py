"""`launch`: run a function on several processes of this machine, for notebooks and tests."""

from __future__ import annotations

import base64
import os
import pickle
import runpy
import selectors
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from plait.core.errors import InputError, LaunchError
from plait.core.shown import shown
from plait.launcher.display import Display
from plait.launcher.environment import STORE
from plait.launcher.fork_server import ForkServer, ServerGoneError
from plait.launcher.messages import Launch
from plait.launcher.supervision.launch_errors import Interrupted, WorkerError
from plait.launcher.supervisor import Supervisor
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import ElasticRules, Placement

if TYPE_CHECKING:
    from plait.launcher.worker_process import LaunchedWorker

T = TypeVar("T")


class ScriptExit(LaunchError):
    """A script ended itself: with a status other than 0, or with a text, as `sys.exit` takes them."""

    def __init__(self, code: object) -> None:
        super().__init__(f"its script ended with status {code}" if isinstance(code, int) else str(code))
        if isinstance(code, int):
            self.exit_status = code % 256 or 1


# How long the others may go on after one has failed: they usually fail because of it.
_AFTER_FAILURE_S = 1.0
# Imported once for all elastic workers. Torch imports the second with the first optimizer of a process.
PRELOAD = ("plait.api.elastic", "torch._dynamo")


def launch(
    fn: Callable[..., T],
    *args: Any,
    workers: int = 2,
    timeout_s: float | None = None,
    elastic: str | None = None,
    **kwargs: Any,
) -> list[T]:
    """What `fn(*args, **kwargs)` returns on each of `workers` new processes of this machine, by rank.

    In the function `plait.init()` connects them, as it does under torchrun. Functions of a notebook or of
    `__main__` are sent by value, so a script needs no `if __name__ == "__main__"`. If a process fails, all
    are ended and its traceback is raised; so they are after `timeout_s`, and when this process ends.

    With `elastic`, the smallest and largest number of workers such as `"1:4"`, workers may come and go
    (`plait.Elastic`): one that is killed is replaced, and the results are those of the workers that came to
    the end, in the order of their numbers.

    Examples:
        ```py
        def rank_of_worker():
            return plait.init().rank

        plait.launch(rank_of_worker, workers=2)  # [0, 1]
        ```
    """
    if not callable(fn):
        raise InputError(f"launch: found {shown(fn)}, expected a function, which runs on each worker")
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise InputError(f"workers: found {shown(workers)}, expected a whole number of at least 1")
    content = cloudpickle.dumps((fn, args, kwargs))
    if elastic is not None:
        return _launch_elastic(content, workers, read_limits(elastic, workers), timeout_s)
    threads = max(1, (os.cpu_count() or 1) // workers)
    with tempfile.TemporaryDirectory(prefix="plait-launch-") as folder:
        server = ForkServer(["plait.api.world"], [path for path in sys.path if path])
        pipes: list[Connection] = []
        try:
            for rank in range(workers):
                here, there = Pipe()
                pipes.append(here)
                with there:
                    variables = {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(workers),
                        "LOCAL_WORLD_SIZE": str(workers),
                        STORE: str(Path(folder) / "store"),
                    }
                    request = {"variables": variables, "threads": threads}
                    server.fork(f"{__name__}:run_worker", request, [1, 2, there.fileno()])
                here.send_bytes(content)
            return _collect(server, pipes, timeout_s)
        finally:
            server.close()
            for pipe in pipes:
                pipe.close()


def read_limits(text: str, workers: int) -> ElasticRules:
    """The limits that `fewest:most` names, which a launch with `workers` has to keep."""
    fewest, colon, most = text.partition(":")
    if not (fewest.isdecimal() and (most.isdecimal() or not colon)):
        raise InputError(f"elastic: found {text!r}, expected the fewest and the most workers, such as '1:4'")
    limits = ElasticRules(int(fewest), int(most) if colon else None)
    if not 1 <= limits.min_workers <= workers <= limits.max_allowed:
        raise InputError(
            f"elastic: found {text!r} for {workers} workers, expected limits such as '1:{workers}' that hold "
            "from the start"
        )
    return limits


class _Printing(Display):
    """Prints what workers print."""

    def printed(self, line: str) -> None:
        print(line, flush=True)


def _launch_elastic(content: bytes, workers: int, limits: ElasticRules, timeout_s: float | None) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="plait-launch-") as folder:
        path = Path(folder) / "function"
        path.write_bytes(content)
        placement = Placement(hosts=(Host(LOCAL, workers),), elastic=limits)
        order = {"path": str(path), "modules": [each for each in sys.path if each]}
        task = Launch(placement, f"{__name__}:call_function", order, preload=PRELOAD, saves=False)
        supervisor = Supervisor(task, _Printing())
        timer = threading.Timer(timeout_s or 0.0, supervisor.request_stop)
        timer.daemon = True
        if timeout_s is not None:
            timer.start()
        try:
            results = supervisor.run()
        except WorkerError as failure:
            raise LaunchError(f"{failure}\n{failure.traceback}") from None
        except Interrupted:
            if timeout_s is None or timer.is_alive():  # stopped from outside
                raise
            raise LaunchError(f"no end of all workers within {timeout_s:g} s") from None
        finally:
            timer.cancel()
    answers = (results[worker] for worker in sorted(results))
    return [pickle.loads(base64.b64decode(answer)) for answer in answers if answer is not None]


def call_function(worker: LaunchedWorker, order: Mapping[str, Any]) -> str | None:
    """The entry of an elastic worker: its result, pickled; None if it has left."""
    sys.path += [each for each in order["modules"] if each not in sys.path]
    fn, args, kwargs = pickle.loads(Path(order["path"]).read_bytes())
    answers: list[Any] = []
    run_launched(worker, lambda: answers.append(fn(*args, **kwargs)))
    return base64.b64encode(cloudpickle.dumps(answers[0])).decode() if answers else None


def run_script(worker: LaunchedWorker, order: Mapping[str, Any]) -> None:
    """The entry of a worker that runs a script, as `python SCRIPT` does."""
    script = order["script"]
    sys.argv[:] = [script, *order["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    run_launched(worker, lambda: runpy.run_path(script, run_name="__main__"))


def run_launched(worker: LaunchedWorker, run: Callable[[], object]) -> None:
    """Run a function or a script of the user as `worker`, to its end together with the others."""
    from plait.api.world import finish, set_launched

    set_launched(worker)
    try:
        run()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ScriptExit(end.code) from None
    finish()


def run_worker(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """The main function of a process; the fork server calls it."""
    import torch

    os.environ |= request["variables"]
    torch.set_num_threads(request["threads"])
    with Connection(descriptors[0]) as pipe:
        try:
            fn, args, kwargs = pickle.loads(pipe.recv_bytes())
            answer = (True, fn(*args, **kwargs))
            content = cloudpickle.dumps(answer)
        except BaseException:
            content = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(content)


def _collect(server: ForkServer, pipes: Sequence[Connection], timeout_s: float | None) -> list[Any]:
    """The answers of all processes; LaunchError with the first traceback if one fails."""
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    end = None if timeout_s is None else time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        selector.register(server, selectors.EVENT_READ, None)
        while len(answers) + len(failures) < len(pipes):
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = selector.select(left)
            if not ready:
                break
            for key, _ in ready:
                if key.data is None:
                    _read_server(server)
                    continue
                selector.unregister(key.fileobj)
                _take(pipes[key.data], key.data, answers, failures)
            if failures and (end is None or end > time.monotonic() + _AFTER_FAILURE_S):
                end = time.monotonic() + _AFTER_FAILURE_S
    if failures:
        first = next(iter(failures))  # in time: others may have failed because of it
        others = [rank for rank in sorted(failures) if rank != first]
        more = f"\n(worker {', '.join(map(str, others))} failed, too)" if others else ""
        raise LaunchError(f"worker {first} of {len(pipes)} failed:\n{failures[first]}{more}")
    if len(answers) < len(pipes):
        silent = [rank for rank in range(len(pipes)) if rank not in answers]
        raise LaunchError(f"no answer from worker {', '.join(map(str, silent))} within {timeout_s:g} s")
    return [answers[rank] for rank in range(len(pipes))]


def _read_server(server: ForkServer) -> None:
    try:
        server.receive()
    except ServerGoneError:
        raise LaunchError(
            "the process that workers are forked from ended; was the system out of memory?"
        ) from None


def _take(pipe: Connection, rank: int, answers: dict[int, Any], failures: dict[int, str]) -> None:
    try:
        fine, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        failures[rank] = "it ended without an answer (killed, or out of memory?)"
        return
    if fine:
        answers[rank] = value
    else:
        failures[rank] = value
