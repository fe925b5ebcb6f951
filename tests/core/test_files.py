"""What is written where a person asked for it, and files that only their owner may read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.core import files
from plait.core.errors import DiskError
from plait.graph import pipedream
from support.graphs import PROFILES


def received(pipe: Path, write: Callable[[], None]) -> bytes:
    """What comes out of `pipe` while `write` writes into it."""
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write()
    reader.join(20)
    assert stat.S_ISFIFO(pipe.lstat().st_mode), "the pipe was replaced by a file"
    return found[0]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    assert received(pipe, lambda: files.write_output(pipe, "text")) == b"text"
    assert os.listdir(tmp_path) == ["pipe"]


def test_verbs_write_into_pipes(tmp_path: Path):
    graph = str(PROFILES / "alexnet.txt")
    for name, words in (("plan", ["-o"]), ("timeline", ["-o", str(tmp_path / "x.json"), "--timeline"])):
        pipe = tmp_path / name
        words = ["plan", graph, "--bandwidth", "1e9", *words, str(pipe)]
        found = received(pipe, lambda words=words: CliRunner().invoke(app, words, catch_exceptions=False))
        assert found.startswith(b'{\n "plait": "plan"' if name == "plan" else b"\x89PNG")
    document = pipedream.read(Path(graph))
    pipe = tmp_path / "graph"
    assert received(pipe, lambda: pipedream.write(document, pipe)) == Path(graph).read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a device")
def test_a_device_stays_a_device(tmp_path: Path):
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"x")
    except PermissionError:
        pytest.skip("no devices may be made or used here")
    files.write_output(device, "text")
    assert stat.S_ISCHR(device.lstat().st_mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays_a_link(there: bool, tmp_path: Path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to("folder/target")
    files.write_output(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_standard_output_may_be_named_as_a_file_whatever_it_is(tmp_path: Path):
    link = tmp_path / "stdout"  # what /dev/stdout is
    link.symlink_to("/proc/self/fd/1")
    script = "import sys; from pathlib import Path; from plait.core.files import write_output; print('a'); "
    script += "write_output(Path(sys.argv[1]), 'b\\n'); print('c')"
    command = [sys.executable, "-c", script, str(link)]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    with (tmp_path / "out").open("w") as out:
        subprocess.run(command, stdout=out, timeout=60, check=True)
    assert piped.stdout == (tmp_path / "out").read_text() == "a\nb\nc\n"


def test_a_folder_is_no_place_for_a_file(tmp_path: Path):
    with pytest.raises(DiskError, match="cannot be written: Is a directory; name another place"):
        files.write_output(tmp_path, "text")


def test_the_runs_own_files_never_follow_a_link(tmp_path: Path):
    (tmp_path / "others").write_text("kept")
    (tmp_path / "status.json").symlink_to("others")
    files.write_atomic(tmp_path / "status.json", "new")
    assert (tmp_path / "others").read_text() == "kept"
    assert not (tmp_path / "status.json").is_symlink()


def test_a_private_file_is_private_before_anything_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    modes: list[int] = []
    really_open = os.open

    def watched(path, flags, mode=0o777, **rest):
        descriptor = really_open(path, flags, mode, **rest)
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0o022)
    try:
        files.write_atomic(tmp_path / "token", "secret", private=True)
        files.write_atomic(tmp_path / "other", "open to all")
    finally:
        os.umask(before)
    assert modes[0] == 0o600
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o644
