"""Python reads this as it starts, where support/commands.py says so: another process does this one's work.

A process that would import torch for seconds hands its streams, folder, environment and arguments to the
server there, which forks one that has imported it. This one passes signals on to that and ends as it does;
where this one is killed, so is that.
"""

from __future__ import annotations

import os
import sys

# The network that this process sees: hosts in tests have one each.
NETWORK = "/proc/self/ns/net"


def _stand_in(address: str, module: str, arguments: list[str]) -> int:
    import json
    import signal
    import socket

    descriptors = [0, 1, 2]
    if module == "plait.launch.fork_server":
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


def _end_with(status: int) -> None:
    """As the other ended: `status` is below zero where a signal ended it."""
    if status < 0:
        import signal

        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


_address = os.environ.get("PLAIT_TESTS_FORK_FROM")
_words = sys.orig_argv[1:]
if _address and "-m" in _words:
    _at = _words.index("-m") + 1
    if _words[_at] in ("plait", "plait.launch.fork_server"):
        _end_with(_stand_in(_address, _words[_at], _words[_at + 1 :]))
elif _address and _words and os.path.basename(_words[0]) == "plait":  # the command that people type
    _end_with(_stand_in(_address, "plait", _words[1:]))
