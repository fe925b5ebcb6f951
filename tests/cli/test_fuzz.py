"""A seeded selection of malformed inputs: each is accepted, or refused with one clear message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_no_malformed_input_ends_in_a_traceback_a_hang_or_all_memory():
    command = [sys.executable, str(BENCHMARKS / "fuzz_inputs.py"), "--inputs", "60", "--seed", "1"]
    command += ["--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
