"""The objects for a loop of one's own on a GPU take the steps of one process there.

Two workers on one GPU stand for two hosts where NCCL is configured that way: it then goes by sockets.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import plait
from support.world import WorldError, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS, BATCH = 6, 12
Weights = list[list[float]]


def be_a_host(rank: int) -> None:
    os.environ["NCCL_HOSTID"] = f"host {rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)


def make() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(STEPS, BATCH, 8, dtype=torch.float64)
    return model.double().cuda(), x.cuda(), torch.randint(0, 4, (STEPS, BATCH)).cuda()


def weights_of(model: nn.Module) -> Weights:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def plainly() -> Weights:
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in zip(x, y):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights_of(model)


def largest(found: Weights, expected: Weights) -> float:
    return max(abs(a - b) for one, other in zip(found, expected) for a, b in zip(one, other))


def share(rank: int) -> slice:
    """Unlike shares: worker 0 has five samples of a batch, worker 1 the rest."""
    return slice(0, 5) if rank == 0 else slice(5, BATCH)


def data_parallel(rank: int) -> Weights:
    be_a_host(rank)
    world = plait.init("cuda:0")
    model, x, y = make()
    wrapped = plait.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in zip(x, y):
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs[share(rank)]), targets[share(rank)]).backward()
        optimizer.step()
    wrapped.close()
    assert world.device == torch.device("cuda:0")
    return weights_of(model)


def data_parallel_in_own_group(rank: int, store: str, backend: str) -> Weights:
    """The script has made its process group itself."""
    be_a_host(rank)
    dist.destroy_process_group()
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=2)
    return data_parallel(rank)


def averaging(rank: int) -> Weights:
    be_a_host(rank)
    plait.init("cuda:0")
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    half = slice(0, BATCH // 2) if rank == 0 else slice(BATCH // 2, BATCH)
    with plait.Averaging(model, optimizer, "local-sgd", every=1):
        for inputs, targets in zip(x, y):
            optimizer.zero_grad()
            cross_entropy(model(inputs[half]), targets[half]).backward()
            optimizer.step()
    return weights_of(model)


def pipeline(rank: int, schedule: str) -> Weights:
    be_a_host(rank)
    world = plait.init("cuda:0")
    model, x, y = make()
    pipe = plait.Pipeline(
        model,
        world.world_size,
        example_inputs=(x[0],),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        schedule=schedule,
        microbatches=3,
    )
    for inputs, targets in zip(x, y):
        pipe.step(inputs, targets)
    state = pipe.state_dict()
    pipe.close()
    return [state[name].flatten().tolist() for name, _ in model.named_parameters()] if rank == 0 else []


def test_data_parallel_on_a_gpu_equals_one_process() -> None:
    for found in run_ranks(2, data_parallel, deadline_s=120.0):
        assert largest(found, plainly()) < 1e-12


def test_data_parallel_in_a_process_group_that_the_script_made(tmp_path: Path) -> None:
    both = "cpu:gloo,cuda:nccl"
    for found in run_ranks(2, data_parallel_in_own_group, str(tmp_path / "both"), both, deadline_s=120.0):
        assert largest(found, plainly()) < 1e-12
    with pytest.raises(WorldError, match="sends no tensors of the CPU, as Plait has to"):
        run_ranks(2, data_parallel_in_own_group, str(tmp_path / "nccl"), "nccl", deadline_s=120.0)


def test_averaging_on_a_gpu_after_every_step_equals_one_process() -> None:
    for found in run_ranks(2, averaging, deadline_s=120.0):
        assert largest(found, plainly()) < 1e-10


@pytest.mark.parametrize("schedule", ["flush", "gpipe", "zero-bubble"])
def test_a_pipeline_on_a_gpu_equals_one_process(schedule: str) -> None:
    found, _ = run_ranks(2, pipeline, schedule, deadline_s=120.0)
    assert largest(found, plainly()) < 1e-10


def test_a_loader_pins_its_batches() -> None:
    plait.init("cuda:0")
    rows = torch.arange(40.0)
    loader = plait.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert sorted(torch.cat(batches).tolist()) == rows.tolist()
