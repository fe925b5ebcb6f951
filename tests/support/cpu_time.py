"""A plugin of pytest that records the CPU time of each test, with all processes that it starts.

    PYTHONPATH=tests pytest -p support.cpu_time --cpu-times=times.tsv tests/launch

Workers, agents and forked commands are not children of the test process, so `getrusage` does not count them.
A cgroup does: the plugin moves the test run into a new one (root and cgroup v1 or v2) and reads its counter
before and after each phase of each test. Without pytest-xdist only: workers would share the counter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

PLACES = (Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup"))


class CpuCounter:
    """The CPU time of this process and of all that it starts from now on, in seconds."""

    def __init__(self) -> None:
        place = next((place for place in PLACES if (place / "cgroup.procs").exists()), None)
        if place is None:
            raise pytest.UsageError(f"found no cgroup in {PLACES[0]} or {PLACES[1]}; --cpu-times needs one")
        self._folder = place / f"plait-tests-{os.getpid()}"
        self._folder.mkdir()
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        usage = self._folder / "cpuacct.usage"
        self._in_nanoseconds = usage.exists()
        # Kept open: a test may put other functions in the place of those that open and read files.
        self._counter = os.open(usage if self._in_nanoseconds else self._folder / "cpu.stat", os.O_RDONLY)

    def seconds(self, pread: Callable[[int, int, int], bytes] = os.pread) -> float:
        words = pread(self._counter, 4096, 0).split()
        return int(words[0]) / 1e9 if self._in_nanoseconds else int(words[1]) / 1e6

    def remove(self) -> None:
        """Leave the cgroup; one in which processes are still ending stays behind."""
        os.close(self._counter)
        (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class CpuTimes:
    """Writes a line `seconds<TAB>phase<TAB>test` for each phase of each test, as soon as it has ended."""

    def __init__(self, file: Path) -> None:
        self._file, self._counter = file.open("w", buffering=1), CpuCounter()

    def _write(self, seconds: float, phase: str, test: str) -> None:
        self._file.write(f"{seconds:.3f}\t{phase}\t{test}\n")

    @contextlib.contextmanager
    def _measured(self, phase: str, test: str) -> Iterator[None]:
        begun = self._counter.seconds()
        try:
            yield
        finally:
            self._write(self._counter.seconds() - begun, phase, test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        with self._measured("setup", item.nodeid):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        with self._measured("call", item.nodeid):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        with self._measured("teardown", item.nodeid):
            yield

    def pytest_sessionfinish(self) -> None:
        self._write(self._counter.seconds(), "", "all, with imports and collection")
        self._counter.remove()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, help="write the CPU time of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(file))
