"""Memory of freed tensors stays in the process, so that taking it again costs no page faults."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from plait.launcher import fork_server

PAGES_OF_TENSORS = 8 * (4 << 20) // resource.getpagesize()

SCRIPT = """
import resource, sys
import torch
from plait.launcher.fork_server import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def allocate_and_free():
    tensors = [torch.empty(1 << 20) for _ in range(8)]
    for tensor in tensors:
        tensor.zero_()

for _ in range(3):
    allocate_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(mode: str, **environment: str) -> int:
    """Page faults of a new process that takes and frees the same tensors ten times."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), **environment},
    )
    return int(done.stdout)


def test_tensors_take_the_memory_of_freed_ones_without_page_faults() -> None:
    """On ARM, torch has an allocator that keeps memory by itself."""
    # The heap may grow once where a small allocation took some freed memory; else each round takes as many.
    assert _page_faults("keep") < PAGES_OF_TENSORS


# That it is not asked for then is shown below.
@pytest.mark.extended
def test_an_allocator_that_the_user_configured_stays_as_it_is() -> None:
    found = _page_faults("default")
    if found < PAGES_OF_TENSORS:
        pytest.skip(f"here {found} page faults are taken anyway")
    assert _page_faults("keep", MALLOC_TRIM_THRESHOLD_="0") > found / 2


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_c_library_without_these_settings_or_configured_by_the_user_is_left_alone(
    is_configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(fork_server.ctypes, "CDLL", lambda name: asked.append(name) or object())
    for variable in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(variable)
    if is_configured:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    fork_server.keep_freed_memory()
    assert asked == ([] if is_configured else [None])
