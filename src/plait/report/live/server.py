"""Serves the page of a run and, by server-sent events, the sections that change while it is open.

    GET  /         the page; with ?token=TOKEN it has the buttons
    GET  /events   server-sent events: {"sections": {"head": "<h1>..."}}, each once it has changed
    POST /stop     {}, with the token in X-Plait-Token; the answer is {"answer": ...} or {"error": ...}
    POST /resize   {"workers": 4}, likewise

Bound to loopback, the page can be read without the token, by its own names only: a name of another site that
leads here (DNS rebinding) is refused. Bound elsewhere, everything needs the token. A client is sent the
newest sections once it has taken the last ones, so a slow one misses versions and holds up nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from plait.core.errors import InputError, PlaitError
from plait.core.shown import shown
from plait.report.live.live_run import LiveRun
from plait.report.outputs.markup import document

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

# How often the run is read while a page is open, and each client looks for new sections.
REFRESH_S = 1.0
LOOK_S = 0.2
# A comment is sent after so long without sections, so that proxies keep the connection.
KEEP_ALIVE_S = 15.0
MOST_CLIENTS = 32
MOST_BYTES = 4096
# How long connections have to end after Ctrl-C.
CLOSE_S = 1
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
Actions = Mapping[str, Callable[[Mapping[str, Any]], str]]


@dataclass(frozen=True)
class Access:
    """Who may do what: `names` are those by which a server on loopback answers, `address` is for people."""

    is_loopback: bool
    names: tuple[str, ...]
    address: str = "127.0.0.1"
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def has_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def refusal(self, request: Request, token: str, is_action: bool) -> str | None:
        """Why the request is refused; None if it is not."""
        host = request.headers.get("host", "")
        if self.is_loopback and _name_in(host) not in self.names:
            return f"found the name {shown(host)}, expected one of {', '.join(self.names)}"
        if request.headers.get("origin", f"http://{host}") != f"http://{host}":
            return "a page of another site may not ask this"
        if (is_action or not self.is_loopback) and not self.has_token(token):
            return "the token is missing or wrong; open the address that plait report --watch has printed"
        return None


def _name_in(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def listen(host: str, port: int) -> tuple[socket.socket, Access]:
    """A socket that listens at `host` and `port` (0 for any free one), and who may connect to it."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"--port: found {port}, expected 0 to {(1 << 16) - 1}; 0 is any free one")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except (OSError, UnicodeError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise InputError(f"--host: found {shown(host)}, which has no address: {reason}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as failure:
        listener.close()
        reason = os.strerror(failure.errno) if failure.errno else str(failure)
        raise InputError(
            f"--host, --port: found {host} and {port}, but cannot listen there: {reason}; use another port, "
            f"or 0 for any free one"
        ) from None
    bound = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    names = dict.fromkeys([host.lower(), str(bound), *LOCAL_NAMES])
    of_people = socket.gethostname() if bound.is_unspecified else f"[{host}]" if ":" in host else host
    return listener, Access(bound.is_loopback, tuple(names), of_people)


def serve(live: LiveRun, listener: socket.socket, access: Access, actions: Actions) -> None:
    """Serve until the process is interrupted (KeyboardInterrupt)."""
    server = make_server(live, access, actions)
    server.run(sockets=[listener])


def make_server(live: LiveRun, access: Access, actions: Actions) -> uvicorn.Server:
    """A server of the page that ends once its `should_exit` is set."""
    import uvicorn

    site = _Site(live, access, actions)
    config = uvicorn.Config(
        site.app(),
        log_level="critical",
        access_log=False,
        http="h11",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    site.server = uvicorn.Server(config)
    return site.server


class _Site:
    """What is answered to requests. The run is read in a thread, and only while a page is open."""

    server: uvicorn.Server

    def __init__(self, live: LiveRun, access: Access, actions: Actions) -> None:
        self._live, self._access, self._actions = live, access, actions
        # Versions of another server, before this one, mean nothing here.
        self._id = secrets.token_hex(4)
        self._clients = 0
        self._refreshing = asyncio.Lock()
        self._refreshed_s = -REFRESH_S

    def app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        actions = [Route(f"/{name}", self._act, methods=["POST"], name=name) for name in self._actions]
        routes = [Route("/", self._page), Route("/events", self._events), *actions]
        return Starlette(routes=routes, lifespan=self._running)

    @contextlib.asynccontextmanager
    async def _running(self, app: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(self._keep_fresh())
        yield
        reading.cancel()

    async def _keep_fresh(self) -> None:
        while True:
            if self._clients:
                try:
                    await self._refresh()
                except Exception as failure:  # a damaged file, which may be whole again in a second
                    log.debug("the page was not refreshed: %s", failure)
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self) -> None:
        async with self._refreshing:
            if time.monotonic() - self._refreshed_s >= REFRESH_S / 2:
                await asyncio.to_thread(self._live.refresh)
                self._refreshed_s = time.monotonic()

    async def _page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, PlainTextResponse

        token = request.query_params.get("token", "")
        if refusal := self._access.refusal(request, token, is_action=False):
            return PlainTextResponse(refusal, 403)
        await self._refresh()
        version, sections = self._live.since(0)
        known = token if self._access.has_token(token) else ""
        if not known:
            sections["controls"] = ""
        order = ("head", "controls", "watch")
        sections["watch"] = _watch_section({"id": f"{self._id}-{version}", "token": known})
        ordered = {name: sections.pop(name) for name in order} | sections
        style, script = (resources.files("plait.report.live").joinpath(name).read_text() for name in _FILES)
        text = document(self._live.name, ordered, style, script)
        return HTMLResponse(text, headers={"Content-Security-Policy": _policy(text), **_HEADERS})

    async def _events(self, request: Request) -> ASGIApp:
        from starlette.responses import PlainTextResponse, StreamingResponse

        token = request.query_params.get("token", "")
        if refusal := self._access.refusal(request, token, is_action=False):
            return PlainTextResponse(refusal, 403)
        if self._clients >= MOST_CLIENTS:
            return PlainTextResponse(f"{MOST_CLIENTS} pages are open already; close one", 503)
        seen = request.headers.get("last-event-id") or request.query_params.get("since", "")
        server, _, version = seen.partition("-")
        first = int(version) if server == self._id and version.isdecimal() else 0
        stream = StreamingResponse(
            self._stream(request, first), media_type="text/event-stream", headers=_HEADERS
        )
        # Counted before anything is sent: of requests that come at once, those beyond the limit are refused.
        self._clients += 1

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await stream(scope, receive, send)
            finally:
                self._clients -= 1

        return respond

    async def _stream(self, request: Request, version: int) -> AsyncIterator[str]:
        sent_s = 0.0
        while not self.server.should_exit and not await request.is_disconnected():
            version, sections = self._live.since(version)
            if sections:
                text = json.dumps({"sections": sections}, separators=(",", ":"))
                yield f"id: {self._id}-{version}\ndata: {text}\n\n"
            elif time.monotonic() - sent_s > KEEP_ALIVE_S:
                yield ": \n\n"
            else:
                await asyncio.sleep(LOOK_S)
                continue
            sent_s = time.monotonic()

    async def _act(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        if refusal := self._access.refusal(request, request.headers.get("x-plait-token", ""), is_action=True):
            return JSONResponse({"error": refusal}, 403)
        try:
            content = await _content(request)
            answer = await asyncio.to_thread(self._actions[request.url.path.strip("/")], content)
        except PlaitError as failure:
            return JSONResponse({"error": str(failure)}, 400)
        self._refreshed_s = -REFRESH_S
        return JSONResponse({"answer": answer})


async def _content(request: Request) -> Mapping[str, Any]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise InputError(f"found a request of more than {MOST_BYTES} bytes")
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError) as failure:
        raise InputError(f"the request is no JSON: {failure}") from None
    if not isinstance(content, dict):
        raise InputError(f"found {shown(content)}, expected an object")
    return content


_FILES = ("watch.css", "watch.js")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _policy(page: str) -> str:
    """Only the script of the page runs, it reaches only this server, and no other site frames the page."""
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _watch_section(data: Mapping[str, str]) -> str:
    return (
        f'<p id="answer" role="status"></p><p id="lost" class="bad" hidden></p><dialog id="question"><p></p>'
        f'<button name="no" autofocus>Cancel</button> <button name="yes" class="bad"></button></dialog>'
        f'<script type="application/json" id="watch-data">{json.dumps(data)}</script>'
    )
