"""Loader processes: they start quickly, are kept, end with their worker, and fail in the user's words."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import traceback
from dataclasses import replace
from itertools import count
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from plait.core.errors import DataError
from plait.data.loader import load
from plait.data.loader_processes import LoaderError, LoaderPool
from plait.data.sampler import GlobalBatch, Position
from plait.schema.settings import DataSettings, ModelSettings
from plait.training import components
from plait.training.evaluate import evaluate_parts, in_order
from support.training import digits_job
from support.world import run_ranks


class Noted:
    """A data set that leaves a file with the number of each process that reads it."""

    def __init__(self, split: str, folder: str, samples: int = 24) -> None:
        self.folder = Path(folder)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        (self.folder / str(os.getpid())).touch()
        return torch.full((1, 8, 8), float(index)), torch.tensor(index % 10)


def readers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def load_for_ever(rank: int, folder: Path) -> None:
    endless = (GlobalBatch(0, tuple(range(24)), Position()) for _ in count())
    for _ in load(Noted("train", str(folder)), endless, seed=0, rank=0, world_size=1, loaders=2):
        (folder.parent / f"worker-{os.getpid()}").touch()


def test_loaders_end_with_a_worker_that_is_killed_and_leave_no_shared_memory(tmp_path: Path) -> None:
    folder = tmp_path / "readers"
    folder.mkdir()

    def all_read() -> bool:
        return len(readers(folder)) >= 2 and any(tmp_path.glob("worker-*"))

    run_ranks(1, load_for_ever, folder, kill_when=all_read, deadline_s=60)
    loaders = [psutil.Process(pid) for pid in readers(folder) if psutil.pid_exists(pid)]
    try:
        end = time.monotonic() + 10
        while any(is_running(loader) for loader in loaders) and time.monotonic() < end:
            time.sleep(0.02)
        assert not [loader for loader in loaders if is_running(loader)]
        assert not [name for pid in readers(folder) for name in Path("/dev/shm").glob(f"torch_{pid}_*")]
    finally:
        for loader in filter(is_running, loaders):
            loader.kill()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def evaluate_often(rank: int, folder: Path) -> list[dict[str, float]]:
    job = digits_job(
        model=ModelSettings("support.training:small_net"),
        data=DataSettings("test_loaders:Noted", 8, {"folder": str(folder)}, loaders=2),
    )
    parts = components.build(job, torch.device("cpu"))
    # The loaders are children of their worker, not of another server that forks.
    found = [evaluate_parts(parts, job) for _ in range(4)]
    assert all(psutil.Process(pid).ppid() == os.getpid() for pid in readers(folder))
    none = replace(job, data=replace(job.data, loaders=0))
    return [*found, evaluate_parts(parts, none)]


def test_evaluations_share_loaders_that_their_worker_has_forked(tmp_path: Path) -> None:
    (found,) = run_ranks(1, evaluate_often, tmp_path)
    assert found == [found[-1]] * 5
    # The last evaluation was the worker's own.
    assert len(readers(tmp_path)) == 3


def test_two_uses_at_a_time_have_loaders_of_their_own(tmp_path: Path) -> None:
    source = components.DataSource(Noted("train", str(tmp_path)))

    def start() -> Any:
        return load(source, in_order(24, 4), seed=0, rank=0, world_size=1, loaders=1)

    first, second = start(), start()
    pairs = [(a.content[1].tolist(), b.content[1].tolist()) for a, b in zip(first, second)]
    assert pairs == [([i % 10 for i in range(n, n + 4)],) * 2 for n in range(0, 24, 4)]
    assert len(readers(tmp_path)) == 2
    # One that was left in the middle serves again, from the beginning.
    third = start()
    next(third), next(third)
    third.close()
    assert [b.after.sample for b in start()] == [4, 8, 12, 16, 20, 24]
    assert len(readers(tmp_path)) == 2


class Difficult(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, index: int, words: str) -> None:
        super().__init__(f"sample {index}: {words}")


class Failing:
    def __init__(self, failure: str) -> None:
        self.failure = failure

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise {
                "data": DataError("img_5.png: cannot be decoded"),
                "own": Difficult(5, "bad label"),
                "file": FileNotFoundError(2, "No such file", "img_5.png"),
            }[self.failure]
        return torch.zeros(2), torch.tensor(0)


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ("data", DataError, "img_5.png: cannot be decoded"),
        ("own", Difficult, "sample 5: bad label"),
        ("file", FileNotFoundError, "[Errno 2] No such file: 'img_5.png'"),
    ],
)
def test_what_a_sample_raises_in_a_loader_reaches_the_user_as_it_was(
    failure: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        list(load(Failing(failure), in_order(8, 2), seed=0, rank=0, world_size=1, loaders=2))
    assert type(caught.value) is kind
    assert str(caught.value) == words
    shown_text = "".join(traceback.format_exception(caught.value))
    assert shown_text.count(words) == 1
    assert "DataLoader worker process" not in shown_text
    # A message of ours says all; of the user's own error the line that raised it is shown, once.
    shown = 0 if failure == "data" else 1
    assert shown_text.count("in __getitem__\n    raise") == shown
    assert shown_text.count("In a loader process:\n  File") == shown
    assert "in _sample" not in shown_text


class Killed(Failing):
    """Its sample 5 takes all memory, so that the kernel ends the process."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(50_000), torch.tensor(0)


def test_a_loader_that_was_killed_is_named_at_once() -> None:
    batches = load(Killed(""), in_order(8, 2), seed=0, rank=0, world_size=1, loaders=2)
    words = r"data.loaders: a loader process \(pid \d+\) ended by SIGKILL; was memory short\?"
    begin = time.monotonic()
    with pytest.raises(LoaderError, match=words):
        list(batches)
    assert time.monotonic() - begin < 20


class Signals:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), torch.tensor(int(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))


def test_loaders_leave_ctrl_c_and_random_numbers_to_their_worker() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    (batch,) = load(Signals(), in_order(4, 4), seed=0, rank=0, world_size=1, loaders=1)
    assert batch.content[1].tolist() == [1] * 4
    assert torch.equal(torch.get_rng_state(), before)


class Boxes:
    """Each sample has many small tensors, each of which needs a descriptor on its way."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), [torch.tensor([index]) for _ in range(300)]


def load_with_few_descriptors(rank: int) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept = list(load(Boxes(), in_order(8, 2), seed=0, rank=0, world_size=1, loaders=1))
    return sum(len(batch.content[1]) for batch in kept)


def test_batches_of_many_tensors_find_descriptors_enough() -> None:
    assert run_ranks(1, load_with_few_descriptors) == [4 * 300]


def test_a_loader_that_is_forked_while_another_thread_closes_pipes_begins_all_the_same(monkeypatch):
    first = LoaderPool(1, abs)
    closed, may_go_on = threading.Event(), threading.Event()
    close = connection.Connection._close

    def close_slowly(self, *args):
        close(self, *args)
        if threading.current_thread() is closing:
            closed.set()
            may_go_on.wait(0.5)  # as os.close, which lets other threads run

    monkeypatch.setattr(connection.Connection, "_close", close_slowly)
    pools = [first]
    del first
    closing = threading.Thread(target=pools.clear)
    closing.start()
    assert closed.wait(10.0)
    assert list(LoaderPool(1, abs).run([-3])) == [3]
    may_go_on.set()
    closing.join(10.0)
