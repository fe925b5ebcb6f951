"""The process that workers are forked from ends quietly with its agent, whatever it was doing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest


def _leave_answers_unread(link: socket.socket) -> None:
    request = json.dumps({"function": "operator:eq", "argument": 0}).encode()
    socket.send_fds(link, [len(request).to_bytes(4, "little")], [1, 2])
    link.sendall(request)
    while b'"ended"' not in link.recv(1 << 16, socket.MSG_PEEK):
        pass


def _break_off_a_request(link: socket.socket) -> None:
    link.sendall((100).to_bytes(4, "little") + b"{")


@pytest.mark.parametrize("leave", [_leave_answers_unread, _break_off_a_request])
def test_it_ends_without_a_word_when_its_agent_has_ended(leave: Callable[[socket.socket], None]) -> None:
    """The socket shows it before the kernel kills this process, which the test keeps from happening."""
    link, theirs = socket.socketpair()
    link.settimeout(60.0)
    arguments = [str(theirs.fileno()), str(os.getpid()), "[]"]
    command = [sys.executable, "-P", "-m", "plait.launcher.fork_server", *arguments]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as server:
        try:
            theirs.close()
            leave(link)
            link.close()
            _, said = server.communicate(timeout=60.0)
        finally:
            server.kill()
    assert (server.returncode, said) == (0, b"")
