"""What processes that share GPU memory leave in /dev/shm is removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

from plait.launch.agent import remove_shared_files


def test_only_files_of_the_given_processes_are_removed(tmp_path: Path):
    theirs = ["torch_4660_99_0", "torch_4660_99_1", "cuda.shm.0.1234.1"]
    others = ["torch_46601_9_0", "torch_466_0_0", "cuda.shm.0.12345.1", "sem.4660", "torch_4661_1_1"]
    for name in theirs + others:
        (tmp_path / name).touch()
    remove_shared_files([0x1234], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(others)
