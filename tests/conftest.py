"""For all tests: hypothesis without deadlines on a noisy machine, and hosts in network namespaces."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from support import server
from support.browser import Browser, missing_for_browser, running_browser
from support.commands import forked_commands, real_commands
from support.hosts import Hosts, missing_for_hosts
from support.processes import starts_processes
from support.schedule import in_order, is_slow

# The same examples on every machine; PLAIT_EXPLORE=1 looks for new ones.
explores = bool(os.environ.get("PLAIT_EXPLORE"))
settings.register_profile(
    "plait", deadline=None, print_blob=True, derandomize=not explores, max_examples=100 if explores else 40
)
settings.load_profile("plait")
if not explores:
    # Hypothesis would parse every imported module for constants to try, in each worker, and examples would
    # depend on what happens to be imported.
    providers._get_local_constants = lambda: providers._local_constants

# Worlds have one thread a rank; so has the process that compares them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Agents and servers of workers start dozens of times: they should not compile Plait's sources each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# The workers of pytest-xdist start after this and share it.
server.own()


# No test cuts the power: what a killed process has written stays. Only commands that are not forked wait.
os.fsync = lambda descriptor: None  # type: ignore[assignment]


# Where the tests run in the background of a shell, Ctrl-C is ignored, and so it would be by all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers are forked from the server, which has imported torch, rather than started."""
    from support.xdist_worker import forked

    specs[:] = map(forked, specs)


# Nothing that is imported for the tests is garbage, and looking for some took a seventh of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Spare garbage collections what was imported: torch and all tests, which stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `make quick` leaves out, where it asks: slow ones, and those that start processes.

    The slowest modules come first.
    """
    chosen = config.getoption("markexpr")
    for item in items:
        if "slow" in chosen and is_slow(item):
            item.add_marker("slow")
        if "processes" in chosen and isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("processes")
    items[:] = in_order(items)


@pytest.fixture(autouse=True)
def _leave_world() -> Iterator[None]:
    """A world that a test has joined in this process, and not left, is not that of the next test."""
    yield
    module = sys.modules.get("plait.api.world")
    if module is not None and module._world is not None:
        module._world.close()


@pytest.fixture(scope="module", name="forked_commands")
def _forked_commands() -> Iterator[None]:
    """Commands and servers of workers that the module's tests start are forked, with torch imported."""
    with forked_commands():
        yield


@pytest.fixture(name="real_commands")
def _real_commands() -> Iterator[None]:
    """But not those of this test."""
    with real_commands():
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps that this process starts draw no curves, which takes a second each."""
    monkeypatch.setattr("plait.report.sweep.has_extra", lambda package: False)


@pytest.fixture
def fused_steps_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that measures its width finds that, whatever else the machine does while steps are timed."""
    monkeypatch.setattr("plait.sweeping.array_size.slower_by", lambda *_: 0.0)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real Chromium, shared by all tests of a process: `browser.open(page.as_uri())`."""
    if reason := missing_for_browser():
        pytest.skip(reason)
    with running_browser() as running:
        yield running


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Network namespaces joined by a bridge: `hosts.make("w0", "w1")`. Always cleaned up."""
    if reason := missing_for_hosts():
        pytest.skip(reason)
    made = Hosts()
    try:
        yield made
    finally:
        made.remove()
