"""Logs are written in order, by a thread that alone waits for the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.launcher.workers import worker_output
from plait.launcher.workers.worker_output import LogWriter


def test_a_disk_that_hangs_holds_up_no_caller_and_what_it_misses_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_output, "MOST_UNWRITTEN_BYTES", 10)
    writer, hanging, other = LogWriter(), tmp_path / "hanging", tmp_path / "folder" / "other"
    os.mkfifo(hanging)  # opening it waits for a reader
    writer.append(hanging, b"first ")
    writer.append(hanging, b"second ")
    writer.append(other, b"kept")
    writer.flush(0.05)
    assert not other.exists()
    reader = os.open(hanging, os.O_RDONLY)
    writer.flush(20.0)
    writer.append(hanging, b"third")
    writer.close(hanging)
    writer.flush(20.0)
    assert os.read(reader, 100) == b"first [7 bytes left out: the disk was too slow]\nthird"
    assert os.read(reader, 100) == b""
    os.close(reader)
    assert other.read_bytes() == b"kept"
