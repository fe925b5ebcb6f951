"""The agent of one host: started through the host's shell, it runs torch's elastic agent over the workers.

It speaks JSON lines with the supervisor over its standard streams:

    in   the order (one line), then {"go": [address, port]}, then possibly {"stop": true};
         the end of the stream means that the supervisor is gone, and ends everything here
    out  {"ready": [address, port]}, {"refused": message}, {"workers": {rank: pid}}, {"progress": ...},
         {"lost": seconds}, and last {"done": {rank: result}} or {"failed": [failure, ...]}

What workers print goes to the agent's standard error, each line with its host and rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from typing import Any, TextIO

from plait.cluster import imports


def main() -> None:
    """Serve one supervisor, then end; a broken pipe on either side ends it too."""
    order = json.loads(sys.stdin.readline())
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    places = [order["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    # Read by libraries when they are loaded: torch.set_num_threads leaves some of them with all cores.
    order["threads"] = order["threads"] or max(1, len(os.sched_getaffinity(0)) // order["slots"])
    os.environ["OMP_NUM_THREADS"] = str(order["threads"])
    # What a step frees the next one asks for again: giving pages back in between took 4% of the time.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # Workers are forked from a server that imports torch and more while this process imports torch.
    _start_fork_server([order["entry"].partition(":")[0], *order["preload"]])
    imports.import_all(["plait.cluster.elastic"])
    from plait.cluster.elastic import serve

    talk = Talk()
    status = serve(order, talk)
    sys.stderr.flush()
    _end_fork_server()
    # The elastic agent and the store leave threads behind that would hold up an ordinary exit.
    os._exit(status)


def _start_fork_server(modules: list[str]) -> None:
    """Start the server that workers are forked from, which imports `modules` for all of them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([imports.__name__])
    os.environ[imports.ORDER] = " ".join(modules)
    forkserver.ensure_running()
    del os.environ[imports.ORDER]


def _end_fork_server() -> None:
    """End the server that workers are forked from; after a refusal it would import on and hold our output."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is not None:
        os.kill(server, signal.SIGKILL)


class Talk:
    """The supervisor's end of the line: say a message, hear the next, watch for stop and hang-up."""

    def __init__(self) -> None:
        # Only messages go to the real standard output; anything printed here goes to standard error.
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def say(self, **message: Any) -> None:
        with self._lock:
            self._out.write(json.dumps(message) + "\n")

    def hear(self) -> dict[str, Any]:
        """The supervisor's next message; EOFError when it has hung up."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        message: dict[str, Any] = json.loads(line)
        return message

    def watch(self, on_stop: Any) -> None:
        """From now on call `on_stop` when the supervisor asks, and end this process when it hangs up."""
        threading.Thread(target=self._watch, args=(on_stop,), daemon=True).start()

    def _watch(self, on_stop: Any) -> None:
        for line in sys.stdin:
            if "stop" in json.loads(line):
                on_stop()
        # Torch's agent answers SIGTERM by ending the workers and then itself.
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
