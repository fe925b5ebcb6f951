"""Sweeps inside test worlds: the real loop and scheduler with a worker that needs no launcher."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from plait.comm.collectives import broadcast_value
from plait.comm.store import StoreServer
from plait.core.codec import encode
from plait.schema.settings import SearchSettings, TrainSettings
from plait.sweeping import worker as sweep_worker
from plait.sweeping.search.space import Dimension, parse_dimension
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from support.averaging import open_store
from support.coordinating import AnsweringThread, ask_over, make_coordinator
from support.meeting import SECRET
from support.training import PlainWorker, train_here, unverified_job
from support.world import run_ranks


def norm_net(classes: int = 10, width: int = 4) -> nn.Module:
    """A convolution with BatchNorm: statistics that padding must not touch."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, classes),
    )


class Halves(nn.Module):
    """A model with weights that nobody uses, a number of its own and, when `tied`, one weight twice."""

    def __init__(self, scale: float = 1.0, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = scale
        self.drop, self.drop_again = nn.Dropout(dropout), nn.Dropout(dropout)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)
        self.spare = nn.Linear(2, 2)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x.flatten(1)).relu() * self.scale)
        return self.last(self.drop_again(self.second(x).relu()))


class Dilated(nn.Module):
    """A convolution whose dilation, a tuple, leaves no trace in shapes."""

    def __init__(self, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding="same", dilation=dilation)
        self.last = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x).relu().flatten(1))


class Counting(nn.Module):
    """A model that counts its training forwards in Python, and is another one from the fifth on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        y = self.layer(x.flatten(1))
        return y * 2 if self.calls > 4 else y


class Keeping(nn.Module):
    """A model that keeps what it computed in a list, in a dictionary and in a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.maps: list[torch.Tensor] = []
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.flatten(1))
        self.maps = [y, x]
        self.seen = {"last": y, "deep": {"relu": (y.relu(),)}}
        return y


class Branching(nn.Module):
    """A model that asks for values from its fourth training forward on, which fused trials cannot answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.flatten(1))
        if self.training:
            self.calls += 1
            if self.calls > 3 and y.sum().item() > 0:
                return y * 1.5
        return y


class Configured(nn.Module):
    """A model that makes a tuple of a float argument."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.kernel = (1 + 2 * round(share), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = functional.max_pool2d(x, self.kernel, stride=1, padding=(self.kernel[0] // 2, 0))
        return self.layer(pooled.flatten(1))


class OnFrozenBase(nn.Module):
    """A trained head on a base that each model loads anew, and that has batch statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.base = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x.flatten(1)))


def sweep_of(*over: str | Dimension, width: int | None = 4, job: Any = None, **search: Any) -> SweepSettings:
    """A sweep of the small digits job over `over`, as on the command line."""
    dimensions = tuple(parse_dimension(one) if isinstance(one, str) else one for one in over)
    return SweepSettings(job or unverified_job(steps=30), dimensions, SearchSettings(**search), width)


def sweep_here(
    settings: SweepSettings, folder: Path, resume: bool = False, stop_file: Path | None = None
) -> dict[str, Any]:
    """The result of a sweep in this process."""
    torch.set_num_threads(1)
    request = {"settings": encode(settings), "folder": str(folder), "resume": resume}
    sweep_worker.check_request(request)
    worker = PlainWorker(stop_file)
    coordinator = make_coordinator(settings, folder, (0,), resume)
    worker.ask = coordinator.answer
    sweep_worker.sweep(worker, request)
    return coordinator.close().to_dict()


def sweep_rank(
    rank: int, settings: SweepSettings, folder: Path, resume: bool = False, stop_file: Path | None = None
) -> dict[str, Any]:
    """As `sweep_here`, for `run_ranks`: what this rank of a world returns; the world stays."""
    request = {"settings": encode(settings), "folder": str(folder), "resume": resume}
    address = StoreServer(SECRET).address.text if rank == 0 else None
    worker = PlainWorker(stop_file, address=broadcast_value(address, 0))
    worker.ask = partial(ask_over, worker.store)
    coordinator = None
    if rank == 0:
        ranks = tuple(range(worker.world_size))
        made = make_coordinator(settings, folder, ranks, resume)
        coordinator = AnsweringThread(open_store(worker.store.address.text), made)
    with mock.patch.object(dist, "destroy_process_group"):
        sweep_worker.sweep(worker, request)
    dist.barrier()
    result = {} if coordinator is None else coordinator.close()
    # The first rank holds the store.
    dist.barrier()
    return result


def stop_and_go_on(rank: int, settings: SweepSettings, folder: Path) -> tuple[Any, list[str], Any]:
    """A sweep that all groups stop after its first checkpoint, the checkpoints then, and its end."""
    saved = folder / "trials" / "0000" / "checkpoints"
    stopped = sweep_rank(rank, settings, folder, stop_file=saved)
    found = [path.name for path in sorted(folder.glob("trials/*/checkpoints/step-*"))]
    dist.barrier()
    return stopped, found, sweep_rank(rank, settings, folder, resume=True)


def sweeps_rank(rank: int, sweeps: dict[str, SweepSettings], folder: Path) -> dict[str, Any]:
    """Several sweeps, one after the other, each in a folder of its name below `folder`."""
    return {name: sweep_rank(rank, settings, folder / name) for name, settings in sweeps.items()}


class SweepsWhenAsked(dict[str, Any]):
    """What each of `sweeps` came to on `ranks` workers, by name; each runs when it is first asked for.

    So that no process runs those of tests that another one runs, or nobody.
    """

    def __init__(self, ranks: int, sweeps: dict[str, SweepSettings], folder: Path) -> None:
        super().__init__()
        self._ranks, self._sweeps, self._folder = ranks, sweeps, folder

    def __missing__(self, name: str) -> dict[str, Any]:
        settings, folder = self._sweeps[name], self._folder / name
        self[name] = run_ranks(self._ranks, sweep_rank, settings, folder, deadline_s=100.0)[0]
        return self[name]


def killed_sweep(ranks: int, settings: SweepSettings, folder: Path, *trials: int) -> Path:
    """Where a sweep lies that was killed, and went on, whenever one of `trials` had saved its first state.

    Each time all ranks were still at work. A busy machine may look too late: then the sweep begins anew.
    """
    for attempt in range(5):
        place = folder / f"killed-{attempt}"
        if all(_killed(ranks, settings, place, trial) for trial in trials):
            return place
    raise AssertionError(f"five times the sweep came to its end before it was killed at trials {trials}")


def _killed(ranks: int, settings: SweepSettings, folder: Path, trial: int) -> bool:
    """Start the sweep or go on with it, and kill it; whether nobody had come to the end by then."""
    saved = folder / "trials" / f"{trial:04d}" / "checkpoints"
    if any(saved.glob("step-*")):
        return False
    resume = folder.exists()
    answers = run_ranks(
        ranks, sweep_rank, settings, folder, resume, kill_when=lambda: any(saved.glob("step-*"))
    )
    return answers == [None] * ranks


def trial_alone(settings: SweepSettings, values: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """The result and the weights of one trial as `plait train` gives them."""
    own: TrainSettings = with_values(settings.train, values)
    return train_here(own, folder)


def same_table(first: dict[str, Any], second: dict[str, Any], tolerance: float = 1e-9) -> bool:
    """Whether two sweeps came to the same, up to rounding."""
    if len(first["trials"]) != len(second["trials"]):
        return False
    return all(_same_row(a, b, tolerance) for a, b in zip(first["trials"], second["trials"]))


def _same_row(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> bool:
    if (
        any(a[key] != b[key] for key in ("trial", "state", "step"))
        or a["metrics"].keys() != b["metrics"].keys()
    ):
        return False
    numbers = [(a["train_loss"], b["train_loss"])]
    numbers += [(a["metrics"][name], b["metrics"][name]) for name in a["metrics"]]
    numbers += [(v, b["values"][k]) for k, v in a["values"].items() if isinstance(v, float)]
    return all(x == y or abs(x - y) <= tolerance for x, y in numbers)
