"""Models that no worker holds as a whole: built, trained, saved and resumed in pieces."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.launcher.run_dir import RunDir
from plait.pipeline.cutting.meta_device import LocalTensors, NotInPiecesError
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import CheckpointSettings, ModelSettings, OptimizerSettings, TrainSettings
from plait.training.checkpoint import list_checkpoints, load
from plait.training.setup.memory import find_local_tensors
from support.further import but_further
from support.pieces import LAYERS, WIDE, Mixed, MostBytes
from support.plans import in_stages, planned, straight_layout, unverified_plan
from support.training import digits_job, largest_difference, saved_weights, train_rank
from support.world import run_ranks

CPU = torch.device("cpu")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # slow to load, and not needed in the worlds

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertModel(BertConfig(vocab_size=100, **sizes))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False)


# Mixed has every kind of module that draws, bert those of transformers.
@pytest.mark.parametrize(
    "factory",
    but_further((Mixed, gpt2, bert, encoder, lambda: nn.LSTM(20, 20, 2)), gpt2, bert),
)
def test_each_workers_tensors_are_those_of_the_whole_model_bit_by_bit(factory: Any):
    def make() -> nn.Module:
        torch.manual_seed(3)
        return factory()

    whole = _tensors(make())
    for part in range(3):
        own = set(list(whole)[part::3])
        pieces = LocalTensors(make, None, CPU)
        pieces.fill(own)
        found = _tensors(pieces.model)
        assert found.keys() == whole.keys()
        for name, tensor in found.items():
            if name in own:
                assert torch.equal(tensor, whole[name]), name
            else:
                assert tensor.shape == whole[name].shape
                assert tensor.untyped_storage().nbytes() == 0, name


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Copying(nn.Module):
    """A weight that is a copy of another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.other.load_state_dict(self.one.state_dict())


def test_a_model_whose_tensors_depend_on_each_other_is_refused_not_made_wrong():
    pieces = LocalTensors(Copying, None, CPU)
    with pytest.raises(NotInPiecesError):
        pieces.fill({"other.weight"})


def each_way(rank: int, settings: TrainSettings, folder: Path) -> None:
    """A run that stops and goes on: of whole models, in pieces, and first of whole models, then in pieces."""
    half = replace(settings, steps=2)
    for name, in_pieces in {"whole": False, "pieces": True}.items():
        train_rank(rank, half, folder / name, in_pieces=in_pieces)
    if rank == 0:
        shutil.copytree(folder / "whole", folder / "first whole")
    for name, in_pieces in {"whole": False, "pieces": True, "first whole": True}.items():
        # Nobody looks for a checkpoint that the first rank has not written yet.
        dist.barrier()
        train_rank(rank, settings, folder / name, resume=True, in_pieces=in_pieces)


@pytest.mark.parametrize("replicas", [pytest.param((1, 1), marks=pytest.mark.extended), (2, 1)])
def test_a_run_in_pieces_is_that_of_whole_models_and_resumes_to_it(replicas: tuple[int, ...], tmp_path: Path):
    settings = unverified_plan(
        replicas,
        Schedule.FLUSH,
        model=ModelSettings("support.pieces:Mixed"),
        optimizer=OptimizerSettings("adam", {"lr": 0.01}),
        checkpoint=CheckpointSettings(every_steps=2),
    )
    settings = replace(settings, steps=4)
    run_ranks(sum(replicas), each_way, settings, tmp_path)
    (newest, *_) = list_checkpoints(RunDir(tmp_path / "whole").checkpoints)
    expected = load(newest)
    for name in ("pieces", "first whole"):
        (newest, *_) = list_checkpoints(RunDir(tmp_path / name).checkpoints)
        found = load(newest)
        assert found.step == expected.step == 4
        assert largest_difference(found.model, expected.model) == 0.0, name
        assert largest_difference(found.optimizer, expected.optimizer) == 0.0, name
        assert not list(newest.parent.glob(".step-*"))


def counting_bytes(rank: int, settings: TrainSettings, folder: Path) -> list[float]:
    """Train, and go on; the most bytes of tensors that this worker held at once, by those of the model."""
    shares = []
    for steps, resume in ((1, False), (2, True)):
        own = replace(settings, steps=steps)
        with MostBytes() as most:
            train_rank(rank, own, folder, resume, in_pieces=True)
        shares.append(most.peak / (LAYERS * WIDE * WIDE * 4))
    return shares


def test_a_model_larger_than_a_workers_memory_starts_trains_saves_and_resumes(tmp_path: Path):
    job = digits_job(
        steps=2,
        model=ModelSettings("support.pieces:wide"),
        precision="float32",
        optimizer=OptimizerSettings("sgd", {"lr": 0.01}),
    )
    settings = in_stages(job, straight_layout((1, 1, 1, 1)), Schedule.FLUSH, 2)
    shares = run_ranks(4, counting_bytes, settings, tmp_path)
    # A fourth of the weights, their gradients, and one more tensor on its way.
    assert max(share for worker in shares for share in worker) < 0.7, shares
    assert len(saved_weights(tmp_path)) == LAYERS


def test_workers_hold_pieces_where_the_whole_would_not_fit(monkeypatch: pytest.MonkeyPatch):
    settings = planned((1, 1), Schedule.FLUSH, model=ModelSettings("support.pieces:Mixed"))
    assert find_local_tensors(settings, CPU) is None
    limit = psutil.Process().memory_info().data + 1000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert find_local_tensors(settings, CPU) is not None
    assert find_local_tensors(replace(settings, pipeline=None), CPU) is None
