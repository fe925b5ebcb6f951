"""The control endpoint of an elastic job: HTTP on loopback, protected by a token, to resize the job.

    GET /workers   {"workers": 4, "version": 3, "members": [0, 2, 3, 5], "hosts": {"w0": 2, "w1": 2}, ...}
    PUT /workers   {"workers": 6, "version": 3} or {"hosts": ["w0:4", "w1:2"]}; 409 if the version is stale

Its address and token are in the run's folder, in a file that only its owner can read. The supervisor's thread
answers requests one at a time. Connections that have not sent the token time out after a few seconds, and
beyond `MOST_PENDING` the oldest is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import logging
import queue
import secrets
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from plait.core.codec import decode
from plait.core.errors import InputError, PlaitError
from plait.core.files import write_atomic
from plait.core.shown import shown
from plait.launcher.membership_decisions import ControlRequest, StaleVersionError
from plait.launcher.run_dir import RunDir
from plait.schema.hosts import parse_hosts

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 10
# Timeout of the supervisor's answer, and of reading the request of a client.
ANSWER_S = 10.0
# The timeout of connections that have not sent the token, and the largest number of them.
PROVE_S = 5.0
MOST_PENDING = 32
PATH = "/workers"
ATTEMPTS = 5
# How often the endpoint checks whether the job has ended.
POLL_S = 0.05


@contextlib.contextmanager
def serving(folder: RunDir, address: str, ask: Callable[[ControlRequest], None]) -> Iterator[None]:
    """Serve requests at `address` (host:port, port 0 for any); `ask` queues them for the supervisor."""
    host, _, port = address.rpartition(":")
    token = secrets.token_urlsafe(32)
    try:
        server = _ControlServer((host, int(port)))
    except (OSError, OverflowError) as failure:
        raise InputError(
            f"parallel.control: found {shown(address)}, but cannot listen there: {failure}; use a free "
            f"port, or 0 for any"
        ) from None
    server.token, server.ask = token, ask
    url = f"http://{host}:{server.server_address[1]}{PATH}"
    write_atomic(folder.control, json.dumps({"url": url, "token": token}), private=True)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="plait-control", daemon=True)
    thread.start()
    try:
        yield
    finally:
        folder.control.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


class _ControlServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    token: str
    ask: Callable[[ControlRequest], None]

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _ControlHandler)
        # The connections without token, oldest first, with their deadlines; and all connections.
        self._pending: dict[socket.socket, float] = {}
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            while len(self._pending) >= MOST_PENDING:
                self._drop(next(iter(self._pending)))
            # The descriptor of a dropped connection stays open until its thread has closed it.
            self._changed.wait_for(lambda: len(self._open) < 2 * MOST_PENDING, timeout=ANSWER_S)
            self._pending[request] = time.monotonic() + PROVE_S
            self._open.add(request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop connections whose deadline has passed; called by the server in each poll."""
        now = time.monotonic()
        with self._changed:
            for request in [each for each, end in self._pending.items() if end < now]:
                self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Shut a connection down; the thread that reads from it then closes it."""
        del self._pending[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def on_proven(self, request: socket.socket) -> bool:
        """Mark the connection as authorized; False if it has been dropped."""
        with self._changed:
            return self._pending.pop(request, None) is not None

    def close_request(self, request: Any) -> None:
        super().close_request(request)
        with self._changed:
            self._pending.pop(request, None)
            self._open.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors other than broken connections."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request to the control endpoint failed")


class _ControlHandler(BaseHTTPRequestHandler):
    server: _ControlServer
    server_version = "plait"
    sys_version = ""
    timeout = ANSWER_S

    def do_GET(self) -> None:
        self._serve(lambda: ControlRequest())

    def do_PUT(self) -> None:
        self._serve(lambda: read_request(self._body()))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self, read: Callable[[], ControlRequest]) -> None:
        known = f"Bearer {self.server.token}".encode()
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(errors="replace"), known):
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "the token of the run's folder is needed"})
            return
        if not self.server.on_proven(self.connection):
            return
        if self.path != PATH:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"found {shown(self.path)}, expected {PATH}"})
            return
        try:
            request = read()
            self.server.ask(request)
            answer = request.answer.get(timeout=ANSWER_S)
        except InputError as failure:
            answer = failure
        except queue.Empty:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the job does not answer"})
            return
        if isinstance(answer, StaleVersionError):
            self._answer(HTTPStatus.CONFLICT, {"error": str(answer)})
        elif isinstance(answer, PlaitError):
            self._answer(HTTPStatus.BAD_REQUEST, {"error": str(answer)})
        else:
            self._answer(HTTPStatus.OK, answer)

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            raise InputError(f"Content-Length: found {shown(length)}, expected {MOST_BYTES} bytes at most")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as failure:
            raise InputError(f"the request is no JSON: {failure}") from None

    def _answer(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        # The body of a refused request is not read.
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


@dataclass(frozen=True)
class _Resize:
    """The content of a request to resize."""

    workers: int | None = None
    hosts: tuple[str, ...] | None = None
    version: int | None = None
    without: tuple[int, ...] = ()
    why: str = ""


def read_request(content: Any) -> ControlRequest:
    """Parse the JSON content of a request; InputError if it is wrong."""
    if not isinstance(content, dict) or ("workers" in content) == ("hosts" in content):
        expected = 'an object with workers or hosts, such as {"workers": 4, "version": 1}'
        raise InputError(f"found {shown(content)}, expected {expected}")
    given = content.get("hosts", [])
    if not isinstance(given, list) or not all(isinstance(host, str) for host in given):
        raise InputError(f"request.hosts: found {shown(given)}, expected a list such as ['w0:2', 'w1:2']")
    asked = decode(_Resize, content, "request")
    if len(asked.why) > 1000:
        raise InputError(f"request.why: found {shown(asked.why)}, expected at most 1000 characters")
    hosts = None if asked.hosts is None else parse_hosts(asked.hosts, "hosts")
    by = "control endpoint"
    return ControlRequest(asked.workers, hosts, asked.version, asked.without, by, asked.why)


def ask_job(folder: RunDir, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of the running job's workers; with `content`, after a request to change them."""
    if folder.holder() is None:
        raise InputError(f"{folder.path}: not running; only a running job has workers to change")
    try:
        known = json.loads(folder.control.read_text())
        url, token = str(known["url"]), str(known["token"])
    except FileNotFoundError:
        raise InputError(
            f"{folder.path}: its workers are fixed, or it has just begun; start a job whose workers may come "
            f"and go with parallel.elastic: true"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise InputError(f"{folder.control}: cannot be read: {failure}") from None
    request = urllib.request.Request(
        url,
        None if content is None else json.dumps(content).encode(),
        {"Authorization": f"Bearer {token}"},
        method="GET" if content is None else "PUT",
    )
    # The endpoint is on this machine, so no proxy is used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for left in reversed(range(ATTEMPTS)):
        try:
            with opener.open(request, timeout=ANSWER_S + 5.0) as response:
                state: dict[str, Any] = json.loads(response.read())
                return state
        except urllib.error.HTTPError as failure:
            raise _refusal(failure) from None
        except (OSError, http.client.HTTPException) as failure:
            if not left or not _was_dropped(failure):
                raise PlaitError(f"{folder.path}: the job does not answer: {failure}") from None
    raise AssertionError


def _was_dropped(failure: Exception) -> bool:
    """Whether the endpoint may have dropped the connection because too many others were open."""
    return isinstance(getattr(failure, "reason", failure), (ConnectionResetError, BrokenPipeError))


def _refusal(failure: urllib.error.HTTPError) -> PlaitError:
    try:
        message = str(json.loads(failure.read())["error"])
    except (ValueError, KeyError, TypeError, OSError):
        message = str(failure)
    if failure.code == HTTPStatus.CONFLICT:
        return StaleVersionError(message)
    return InputError(message) if failure.code < HTTPStatus.INTERNAL_SERVER_ERROR else PlaitError(message)
