"""AWD-LSTM: its kinds of dropout, and state that goes on from batch to batch wherever the model is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plait.core.errors import DataError, JobError
from plait.data.requirements import check_unchanged
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    SyncSettings,
    TrainSettings,
)
from plait.sweeping.array_builder import check_replicated
from plait.sweeping.datasets import DataSets
from plait.sweeping.trials.assigned_trials import make_entry
from plait.training import components
from plait.training.setup.model import build_model
from plait.training.worker_group import WorkerGroup
from plait.workloads.data import build
from plait.workloads.data.continued_text import synthetic_text
from plait.workloads.language.awd_lstm import (
    AwdLstm,
    CarriedLSTM,
    DroppedEmbedding,
    LockedDropout,
    awd_lstm,
    awd_lstm_tiny,
)
from support.plans import cut_in_two, planned
from support.training import digits_job, largest_difference, saved_weights, train_each, train_here
from support.world import run_ranks

STREAMS, LENGTH, WINDOWS, STEPS = 4, 5, 3, 7
DATA = {"streams": STREAMS, "length": LENGTH, "vocabulary": 12, "windows": WINDOWS}


def job(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model": ModelSettings(
            "plait.workloads.language.awd_lstm:awd_lstm_tiny", {"vocabulary": 12, "streams": STREAMS}
        ),
        "data": DataSettings(
            "plait.workloads.data.continued_text:synthetic_text", STREAMS, DATA, shuffle=False
        ),
        "loss": "cross-entropy",
        "optimizer": OptimizerSettings("sgd", {"lr": 2.0}),
        "evaluate": EvaluateSettings(every_steps=4, metric="perplexity"),
        "steps": STEPS,
    }
    return digits_job(**{**values, **changes})


def plain_loop() -> tuple[dict[str, torch.Tensor], float]:
    """Truncated backpropagation as anyone would write it: the state is a variable of the loop."""
    model = build_model(job().model, 0).double()
    train, test = (synthetic_text(split, **DATA) for split in ("train", "test"))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    state: Any = None
    for step in range(STEPS):
        window = step % WINDOWS
        (tokens, _, _), target = batch_of(train, window)
        logits, state = forward(model, tokens, None if window == 0 else state)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimizer.step()
    total, state = 0.0, None
    with torch.no_grad():
        for window in range(WINDOWS):
            (tokens, _, _), target = batch_of(test, window)
            logits, state = forward(model, tokens, state)
            total += F.cross_entropy(logits.flatten(0, 1), target.flatten()).item() / WINDOWS
    return model.state_dict(), total


def batch_of(dataset: Any, window: int) -> Any:
    return dataset.collated_batch([window * STREAMS + stream for stream in range(STREAMS)])


def forward(model: Any, tokens: torch.Tensor, state: Any) -> Any:
    """Logits and the layers' last states, from `torch.nn.LSTM` with the model's weights."""
    x, ends = F.embedding(tokens, model.embedding.weight), []
    for number, layer in enumerate(model.layers):
        lstm = torch.nn.LSTM(layer.weight_ih.shape[1], layer.weight_hh.shape[1], batch_first=True).double()
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        own = {f"{name}_l0": getattr(layer, name) for name in names}
        x, end = torch.func.functional_call(lstm, own, (x, None if state is None else state[number]))
        ends.append(tuple(part.detach() for part in end))
    return model.decoder(x), ends


def without_state(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if ".state." not in name}


def test_the_published_model_has_as_many_parameters_as_published() -> None:
    model = awd_lstm()
    assert sum(p.numel() for p in model.parameters()) == 24_221_600


def test_a_run_carries_the_state_as_a_plain_loop_does(tmp_path: Path) -> None:
    weights, loss = plain_loop()
    result, found = train_here(job(), tmp_path)
    assert largest_difference(without_state(found), without_state(weights)) < 1e-9
    assert result.test["loss"] == pytest.approx(loss, abs=1e-9)
    assert result.test["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), abs=1e-4)


def test_workers_and_stages_carry_the_state_as_one_process_does(tmp_path: Path) -> None:
    jobs = {
        "workers": job(accumulate=2, checkpoint=CheckpointSettings(every_steps=5)),
        "flush": cut_in_two(job(), Schedule.FLUSH, 2, recompute=(1,)),
    }
    weights, loss = plain_loop()
    _, alone = train_here(job(), tmp_path / "alone")
    result = run_ranks(2, train_each, jobs, tmp_path)[0]
    for name in jobs:
        found = saved_weights(tmp_path / name)
        assert largest_difference(without_state(found), without_state(weights)) < 1e-9, name
        assert largest_difference(found, alone) < 1e-9, name
        assert result[name].test["loss"] == pytest.approx(loss, abs=1e-9), name


def test_a_resumed_run_continues_the_text_from_the_state_it_was_in(tmp_path: Path) -> None:
    dropped = replace(job().model, args={"vocabulary": 12, "streams": STREAMS, "dropout": 0.3})
    whole, weights = train_here(job(model=dropped), tmp_path / "whole")
    train_here(job(model=dropped, steps=4), tmp_path / "parts")
    resumed, found = train_here(job(model=dropped), tmp_path / "parts", resume=True)
    assert largest_difference(found, weights) == 0.0
    assert resumed.test == whole.test


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"shuffle": True}}, r"data\.shuffle: found true.* set shuffle: false"),
        ({"data": {"batch_size": 2}}, r"data\.batch_size: found 2, but .* has 4 streams"),
        ({"evaluate": EvaluateSettings(batch_size=3)}, r"evaluate\.batch_size: found 3"),
        ({"model": {"args": {"vocabulary": 12, "streams": 8}}}, r"model_args\.streams: found 8, .* is 4"),
        ({"model": {"args": {"vocabulary": 9}}}, r"model_args\.vocabulary: found 9, .* has 12 tokens"),
        ({"sync": SyncSettings("partial-reduce")}, "use sync: all-reduce"),
        ({"data": {"kind": "synthetic", "options": {"shape": [4], "vocabulary": 12}}}, "use kind: continued"),
    ],
)
def test_a_run_that_could_not_continue_the_text_is_refused(changes: dict[str, Any], message: str) -> None:
    settings = job()
    for name, value in changes.items():
        whole = replace(getattr(settings, name), **value) if isinstance(value, dict) else value
        settings = replace(settings, **{name: whole})
    with pytest.raises(JobError, match=message):
        components.build(settings, torch.device("cpu"))


@pytest.mark.parametrize(
    ("policies", "elastic", "message"),
    [
        (["topology", "batch-size"], False, "adapt: found batch-size, but the samples of .* continue"),
        ([], True, "parallel.elastic: found true, but the samples of .* continue"),
    ],
)
def test_changes_of_a_running_job_are_refused_that_would_tear_the_text(
    policies: list[str], elastic: bool, message: str
) -> None:
    settings = replace(job(), adapt=tuple(PolicySettings(kind) for kind in policies))
    parts = components.build(replace(settings, adapt=()), torch.device("cpu"))
    with pytest.raises(JobError, match=message):
        check_unchanged(settings, parts.train_set.dataset, elastic)
    check_unchanged(replace(settings, adapt=(PolicySettings("topology"),)), parts.train_set.dataset, False)


def test_replicated_stages_are_refused_with_what_to_plan_instead() -> None:
    plan = planned((2, 1), Schedule.STASH).pipeline
    with pytest.raises(JobError, match="a stage with 2 replicas.* --straight"):
        components.build(replace(job(), pipeline=plan), torch.device("cpu"))


def test_each_batch_of_a_text_continues_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefghijklmnopqrstuvwxyz" * 3)
    options = {"path": str(tmp_path / "text"), "streams": 2, "length": 4, "level": "byte"}
    train = build("continued-text", "train", **options)
    windows = [train.collated_batch([i, i + 1]) for i in range(0, len(train), 2)]
    for stream in range(2):
        tokens = torch.cat([inputs[0][stream] for inputs, _ in windows])
        targets = torch.cat([target[stream] for _, target in windows])
        assert torch.equal(tokens[1:], targets[:-1])
        assert [bool(inputs[2][stream]) for inputs, _ in windows] == [True] + [False] * (len(windows) - 1)
    (tokens, stream, is_first), target = train[3]
    assert (stream, is_first) == (1, False)
    assert torch.equal(tokens, windows[1][0][0][1])
    assert torch.equal(target, windows[1][1][1])


def test_a_text_that_is_too_short_or_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(DataError, match=r"text, line 3: byte 11 is not UTF-8.* data\.level to byte"):
        build("continued-text", "train", path=str(tmp_path / "text"), streams=2)
    with pytest.raises(DataError, match=r"expected at least 71 for one window of each stream"):
        build("continued-text", "train", path=str(tmp_path / "text"), streams=2, level="byte")


def test_a_checkpoint_is_refused_where_words_have_other_numbers_now(tmp_path: Path) -> None:
    text = tmp_path / "text"
    options = {"path": str(text), "streams": STREAMS, "length": LENGTH, "level": "character"}
    settings = job(data=DataSettings("continued-text", STREAMS, options, shuffle=False), steps=2)
    text.write_text("abcdef" * 60)
    train_here(settings, tmp_path / "run")
    text.write_text("uvwxyz" * 60)
    with pytest.raises(DataError, match="text: the data of continued-text is not what the checkpoint"):
        train_here(replace(settings, steps=3), tmp_path / "run", resume=True)


def test_locked_dropout_drops_the_same_at_all_times_and_weight_drop_the_recurrence_alone() -> None:
    torch.manual_seed(0)
    dropped = LockedDropout(0.5)(torch.ones(2, 6, 8))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    words = DroppedEmbedding(20, 4, 0.5)
    torch.nn.init.ones_(words.weight)
    rows = words(torch.arange(20)).unique(dim=0)
    assert sorted(rows[:, 0].tolist()) == [0.0, 2.0]
    layer = CarriedLSTM(3, 4, streams=2, weight_dropout=1.0)
    x, stream = torch.randn(2, 5, 3), torch.arange(2)
    layer(x, stream, torch.tensor([True, True])).sum().backward()
    assert layer.weight_hh.grad is not None
    assert layer.weight_hh.grad.abs().max() == 0
    assert layer.weight_ih.grad is not None
    assert layer.weight_ih.grad.abs().max() > 0


def test_an_evaluation_leaves_the_state_of_training_alone() -> None:
    model: AwdLstm = awd_lstm_tiny(vocabulary=12)
    (tokens, stream, is_first), _ = batch_of(synthetic_text("train", **DATA), 0)  # type: ignore[arg-type]
    model(tokens, stream, is_first)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = model.eval()(tokens, stream, is_first)
    again = model(tokens, stream, ~is_first)
    assert not torch.equal(first, again)
    assert largest_difference(before, model.state_dict()) == 0.0


def test_a_sweep_with_replicas_of_an_array_is_refused() -> None:
    entry = make_entry(job(), None, torch.device("cpu"), DataSets())
    with pytest.raises(JobError, match="--replicas: .* continue those of the batch before"):
        check_replicated(entry, WorkerGroup([0, 1]))
