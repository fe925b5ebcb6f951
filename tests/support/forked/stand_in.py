"""A process that another one does the work of: it hands over its streams, folder and environment.

Importing torch takes seconds; the server of the tests (support/server.py) forks a process that has imported
it. This one passes signals on to that and ends as it does; where this one is killed, so is that.
"""

from __future__ import annotations

import os
import sys

# The network that this process sees: hosts in tests have one each.
NETWORK = "/proc/self/ns/net"


def stand_in(address: str, module: str, arguments: list[str]) -> int:
    import json
    import signal
    import socket

    descriptors = [0, 1, 2]
    if module == "plait.launcher.fork_server":
        descriptors.append(int(arguments[0]))  # its link to the agent
    network = [os.open(NETWORK, os.O_RDONLY)] if os.path.exists(NETWORK) else []
    requests = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in requests if signal.getsignal(number) is not signal.SIG_IGN]
    order = {
        "module": module,
        "arguments": arguments,
        "descriptors": descriptors,
        "heeded": heeded,
        "cwd": os.getcwd(),
        "path": sys.path,
        "environment": dict(os.environ),
    }
    content = json.dumps(order).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(address)
        socket.send_fds(link, [len(content).to_bytes(4, "little")], descriptors + network)
        link.sendall(content)
        answers = link.makefile("r")
        pid = int(answers.readline())
        for number in heeded:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        # That they end is seen where the other closes them.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(null, descriptor)
        return int(answers.readline())


def end_with(status: int) -> None:
    """As the other ended: `status` is below zero where a signal ended it."""
    if status < 0:
        import signal

        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
