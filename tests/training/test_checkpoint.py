"""Checkpoints: whole or absent, by name, refused when damaged, and resumed to the last bit."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core import events as core_events
from plait.core import run_events
from plait.core.errors import CheckpointError, JobError
from plait.pipeline.named_state import model_state
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EarlyStopSettings,
    EvaluateSettings,
    LrScheduleSettings,
    ModelSettings,
    OptimizerSettings,
)
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint
from plait.training.stages.tensor_file import find_broken
from support.training import largest_difference, train_here, train_rank, unverified_job
from support.world import run_ranks

# BatchNorm, dropout, Adam, a schedule, evaluations and shuffled data: all that a resume must restore.
JOB = unverified_job(
    model=ModelSettings("support.training:norm_net"),
    data=DataSettings("digits", 96),
    optimizer=OptimizerSettings("adam", {"lr": 0.01}),
    lr_schedule=LrScheduleSettings("cosine", warmup_steps=5),
    evaluate=EvaluateSettings(every_steps=9),
    early_stop=EarlyStopSettings(patience=4, metric="accuracy"),
    checkpoint=CheckpointSettings(every_steps=7, keep_last=2, keep_best="loss"),
    precision="float32",
    steps=60,
)


def some_state(step: int = 3) -> Checkpoint:
    return Checkpoint(
        step,
        {"w": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0), "count": torch.tensor(4)},
        {"w/exp_avg": torch.ones(2, 3, dtype=torch.bfloat16), "w/step": torch.tensor(3.0)},
        {"position": {"epoch": 1, "sample": 2}},
    )


def test_a_checkpoint_comes_back_bit_for_bit_with_its_types(tmp_path: Path):
    saved = some_state()
    loaded = checkpoints.load(checkpoints.save(tmp_path, saved))
    assert (loaded.step, loaded.progress) == (saved.step, saved.progress)
    for ours, theirs in ((loaded.model, saved.model), (loaded.optimizer, saved.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours)


def test_tied_weights_are_stored_once_and_come_back_under_both_names(tmp_path: Path):
    shared = torch.randn(50, 50)
    path = checkpoints.save(tmp_path, dataclasses.replace(some_state(), model={"a": shared, "b": shared}))
    assert (path / "model.safetensors").stat().st_size < 1.5 * shared.nbytes
    loaded = checkpoints.load(path).model
    assert torch.equal(loaded["a"], shared)
    assert torch.equal(loaded["b"], shared)


def damage_truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def damage_flip(path: Path) -> None:
    file = path / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def damage_state(path: Path) -> None:
    (path / "state.json").write_text('{"plait": "check')


def damage_foreign(path: Path) -> None:
    (path / "state.json").write_text('{"epoch": 3}')


def damage_missing(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()


DAMAGE = {
    damage_truncate: "it is truncated",
    damage_flip: "its checksum differs",
    damage_state: r"state.json: cannot be read",
    damage_foreign: "not a checkpoint of Plait's",
    damage_missing: "optimizer.safetensors: missing",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_a_damaged_or_foreign_checkpoint_is_refused_with_its_reason(damage, tmp_path: Path):
    path = checkpoints.save(tmp_path, some_state())
    damage(path)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        checkpoints.load(path)


def forge(path: Path, content: bytes) -> None:
    """Put `content` in the place of the model's tensors, with checksums that fit."""
    (path / "model.safetensors").write_bytes(content)
    state = json.loads((path / "state.json").read_text())
    del state["crc32"]
    state["files"]["model.safetensors"] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    checksum = zlib.crc32(json.dumps(state, sort_keys=True).encode())
    (path / "state.json").write_text(json.dumps({**state, "crc32": checksum}))


GOOD_PLACE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        {"dtype": "F31"},
        {"dtype": None},
        {"dtype": ["F32"]},
        {"shape": [2, -3]},
        {"shape": [2, 3, 1 << 70]},
        {"shape": 6},
        {"shape": [2.0, 3]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 23]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [8, 32]},
        {"data_offsets": [24, 0]},
        {"data_offsets": "ab"},
        {"data_offsets": [0, 1 << 70]},
        b"",
        b"\xff" * 20,
        b"[" * 5000,
        b"[]",
        b'{"w": 3}',
        b'{"w": {}}',
        b'{"w": null}',
        1 << 63,
    ],
    ids=str,
)
def test_a_header_that_was_forged_is_refused_in_words(header: Any, tmp_path: Path):
    path = checkpoints.save(tmp_path, dataclasses.replace(some_state(), model={"w": torch.ones(2, 3)}))
    text = json.dumps({"w": {**GOOD_PLACE, **header}}).encode() if isinstance(header, dict) else header
    length = header if isinstance(header, int) else len(text)
    forge(path, length.to_bytes(8, "little") + (b"" if isinstance(header, int) else text + bytes(24)))
    for read in (checkpoints.open_stored, checkpoints.load):
        with pytest.raises(CheckpointError, match=r"model.safetensors|cannot be read"):
            read(path)


def test_a_forged_header_that_fits_is_read(tmp_path: Path):
    path = checkpoints.save(tmp_path, dataclasses.replace(some_state(), model={"w": torch.zeros(2, 3)}))
    text = json.dumps({"w": GOOD_PLACE, "__metadata__": {"a": "b"}}).encode()
    forge(path, len(text).to_bytes(8, "little") + text + bytes(24))
    stored = checkpoints.open_stored(path).model
    assert (list(stored), stored["w"].shape, stored.dtype("w")) == (["w"], (2, 3), torch.float32)


def test_a_write_that_is_interrupted_leaves_the_old_checkpoints_and_nothing_else(tmp_path: Path, monkeypatch):
    checkpoints.save(tmp_path, some_state(1))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_atomic", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tmp_path, some_state(2))
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


def test_what_a_killed_writer_left_is_removed_when_the_run_goes_on(tmp_path: Path):
    job = unverified_job(steps=2)
    train_here(job, tmp_path)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-000000002", folder / ".step-000000003.1234")
    (folder / ".step-model.part").write_text("half")
    train_here(dataclasses.replace(job, steps=4), tmp_path, resume=True)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000002", "step-000000004"]


@pytest.mark.parametrize("step", [3, 4])
def test_a_writer_that_was_stopped_for_a_while_writes_its_checkpoint_to_the_end(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Others have written the same step, or a later one, and pruned."""
    write, moments = checkpoints.write_atomic, [1]

    def write_late(*given: Any) -> None:
        if moments and moments.pop():
            checkpoints.save(tmp_path, some_state(step))
            checkpoints.prune(tmp_path, step, keep_last=1, best=None)
        write(*given)

    monkeypatch.setattr(checkpoints, "write_atomic", write_late)
    path = checkpoints.save(tmp_path, some_state(3))
    assert checkpoints.load(path).step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({path.name, f"step-00000000{step}"})


def test_two_writers_of_one_step_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other one puts its checkpoint in place between this one's look and its own rename."""
    rename, others = Path.rename, [1]

    def rename_late(self: Path, target: Path) -> Path:
        if target.name == "step-000000003" and others and others.pop():
            checkpoints.save(tmp_path, some_state(3))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    assert checkpoints.load(checkpoints.save(tmp_path, some_state(3))).step == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000003"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_values_that_are_no_numbers_are_found_by_name(dtype: torch.dtype):
    good = {"w": torch.ones(3).to(dtype), "count": torch.tensor(4), "empty": torch.zeros(0)}
    nan, inf = (torch.tensor([1.0, value]).to(dtype) for value in (float("nan"), -float("inf")))
    assert find_broken(good) is None
    assert find_broken({**good, "b": nan}) == "b"
    assert find_broken({**good, "b": inf}) == "b"
    assert find_broken({**good, "b": inf}, {"w"}) is None
    assert find_broken({**good, "b": nan}, {"w"}) == "b"


def test_the_last_k_and_the_best_are_kept(tmp_path: Path):
    for step in range(1, 7):
        checkpoints.save(tmp_path, some_state(step))
        checkpoints.prune(tmp_path, step, keep_last=2, best=2 if step >= 2 else None)
    assert [int(p.name[5:]) for p in checkpoints.list_checkpoints(tmp_path)] == [6, 5, 2]


def test_a_checkpoint_of_another_model_is_refused_by_the_first_difference():
    state = dict(torch.nn.Linear(3, 2).state_dict())
    with pytest.raises(CheckpointError, match=r"'weight' has shape \(2, 3\) there and \(2, 4\) in the model"):
        checkpoints.load_model_state(torch.nn.Linear(4, 2), state)
    with pytest.raises(CheckpointError, match="it has no '0.weight', which the model has"):
        checkpoints.load_model_state(torch.nn.Sequential(torch.nn.Linear(3, 2)), state)
    with pytest.raises(CheckpointError, match="it has 'bias', which the model has not"):
        checkpoints.load_model_state(torch.nn.Linear(3, 2, bias=False), state)


class Moment:
    """Comes `delay_s` after a checkpoint of at least `step` steps has appeared."""

    def __init__(self, folder: Path, step: int, delay_s: float) -> None:
        self._folder, self._step, self._delay_s = folder, step, delay_s
        self._appeared: float | None = None

    def has_come(self) -> bool:
        if self._appeared is None:
            found = checkpoints.list_checkpoints(self._folder)
            # One that is just being replaced has another name for a moment.
            if found and int(found[0].name.partition("step-")[2].partition(".")[0]) >= self._step:
                self._appeared = time.monotonic()
        return self._appeared is not None and time.monotonic() - self._appeared >= self._delay_s


# Two workers are killed with their supervisor in faults/test_elastic.py.
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_killed_at_random_points_and_resumed_a_run_ends_with_the_same_bits(workers: int, tmp_path: Path):
    whole = run_ranks(workers, train_rank, JOB, tmp_path / "whole")
    luck = random.Random(11 * workers)
    folder, kills = tmp_path / "killed", 0
    for target in (1, 8, 15, 29, 43):
        # Somewhere after the checkpoint of that step appears: between two steps, in one, in the next write.
        moment = Moment(folder / "checkpoints", target, luck.uniform(0.0, 0.03))
        done = run_ranks(workers, train_rank, JOB, folder, True, kill_when=moment.has_come)
        kills += any(result is None for result in done)
    done = run_ranks(workers, train_rank, JOB, folder, True)
    assert kills >= 3
    for (_, weights), (_, expected) in zip(done, whole):
        assert largest_difference(weights, expected) == 0.0


# tests/test_engines.py has it of every engine.
@pytest.mark.extended
def test_a_run_stopped_between_checkpoints_goes_on_where_it_was(tmp_path: Path):
    whole, expected = train_here(JOB, tmp_path / "whole")
    stop = tmp_path / "stop"
    stop.touch()
    result, _ = train_here(JOB, tmp_path / "part", stop_file=stop)
    assert result.reason == "stopped"
    assert 0 < result.step < 5
    stop.unlink()
    result, weights = train_here(JOB, tmp_path / "part", resume=True)
    assert (result.reason, result.step) == ("finished", 60)
    assert result.test == whole.test
    assert largest_difference(weights, expected) == 0.0


def test_all_workers_stop_at_the_same_step(tmp_path: Path):
    stop = tmp_path / "stop"
    stop.touch()
    results = run_ranks(3, train_rank, JOB, tmp_path / "run", False, stop)
    assert len({(r.reason, r.step) for r, _ in results}) == 1
    assert results[0][0].reason == "stopped"


def test_a_truncated_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path):
    _, expected = train_here(JOB, tmp_path / "whole")
    train_here(dataclasses.replace(JOB, steps=60), tmp_path / "run")
    newest, before, *_ = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")
    damage_truncate(newest)
    _, weights = train_here(JOB, tmp_path / "run", resume=True)
    assert largest_difference(weights, expected) == 0.0
    log = [r.event for r in core_events.read(tmp_path / "run" / "events" / "rank0.jsonl")]
    refused = [e for e in log if isinstance(e, run_events.CheckpointRefused)]
    assert len(refused) == 1
    assert "truncated" in refused[0].reason
    started = [e.step for e in log if isinstance(e, run_events.RunStarted)]
    assert started == [0, int(before.name[5:])]


def test_a_damaged_later_checkpoint_never_takes_the_place_of_a_good_one(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    job = unverified_job(steps=20, checkpoint=CheckpointSettings(every_steps=5, keep_last=1))
    train_here(job, tmp_path)
    damage_truncate(folder / "step-000000020")
    checkpoints.save(folder, some_state(4))
    checkpoints.prune(folder, 4, keep_last=1, best=None)
    assert [int(p.name[5:]) for p in checkpoints.list_checkpoints(folder)] == [20, 4]


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path):
    job = unverified_job(steps=5)
    train_here(job, tmp_path)
    other = dataclasses.replace(job, optimizer=OptimizerSettings("adam", {"lr": 0.01}))
    with pytest.raises(CheckpointError, match="its optimizer is 'sgd', the job's is 'adam'"):
        train_here(other, tmp_path, resume=True)


def test_when_no_checkpoint_can_be_used_the_run_says_so_instead_of_starting_over(tmp_path: Path):
    job = dataclasses.replace(JOB, steps=7)
    train_here(job, tmp_path)
    other = dataclasses.replace(job, model=ModelSettings("support.training:small_net"))
    with pytest.raises(CheckpointError, match="no checkpoint below .* can be used; the newest: "):
        train_here(other, tmp_path, resume=True)


def test_the_world_size_may_change_on_resume_without_repeating_or_skipping_samples(tmp_path: Path):
    # float64 and no BatchNorm or dropout, so that any number of workers takes the same steps.
    job = unverified_job(steps=40, checkpoint=CheckpointSettings(every_steps=13))
    _, expected = train_here(job, tmp_path / "whole")
    run_ranks(2, train_rank, dataclasses.replace(job, steps=15), tmp_path / "run")
    done = run_ranks(3, train_rank, job, tmp_path / "run", True)
    assert largest_difference(done[0][1], expected) < 1e-10


@pytest.mark.parametrize("size", [24, 96])
def test_the_batch_size_may_change_on_resume_and_epochs_still_end_where_they_end(size: int, tmp_path: Path):
    job = unverified_job(steps=None, epochs=3, data=DataSettings("digits", 48))
    stop = tmp_path / "stop"
    stop.touch()
    train_here(job, tmp_path / "run", stop_file=stop)
    stop.unlink()
    changed = dataclasses.replace(job, data=DataSettings("digits", size))
    train_here(changed, tmp_path / "run", resume=True)
    newest = checkpoints.load(checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    assert newest.progress["position"] == {"epoch": 3, "sample": 0, "stream": None}
    log = [r.event for r in core_events.read(tmp_path / "run" / "events" / "rank0.jsonl")]
    assert sum(e.samples for e in log if isinstance(e, run_events.Step)) == 3 * 1442


def test_workers_without_a_shared_folder_load_the_first_ones_checkpoint(tmp_path: Path):
    job = unverified_job(steps=20, checkpoint=CheckpointSettings(every_steps=5))
    _, expected = train_here(job, tmp_path / "whole")
    train_here(dataclasses.replace(job, steps=10), tmp_path / "0")
    done = run_ranks(2, train_in_own_folder, job, tmp_path)
    assert largest_difference(done[1][1], expected) < 1e-10


def train_in_own_folder(rank: int, job, folder: Path):
    return train_rank(rank, job, folder / str(rank), True)


def test_the_best_checkpoint_is_kept_and_patience_ends_the_run(tmp_path: Path):
    job = unverified_job(
        optimizer=OptimizerSettings("sgd", {"lr": 0.0}),
        evaluate=EvaluateSettings(every_steps=2),
        early_stop=EarlyStopSettings(patience=3),
        checkpoint=CheckpointSettings(every_steps=4, keep_last=1, keep_best="accuracy"),
    )
    result, _ = train_here(job, tmp_path)
    # Nothing is learned: the first evaluation is the best, and three more without a gain end the run.
    assert (result.reason, result.step) == ("early-stop", 8)
    assert result.best["step"] == 2
    kept = [int(p.name[5:]) for p in checkpoints.list_checkpoints(tmp_path / "checkpoints")]
    assert kept == [8, 2]
    state = json.loads((tmp_path / "checkpoints" / "step-000000008" / "state.json").read_text())
    assert state["progress"]["best"]["step"] == 2
    # Patience that is spent stays spent.
    again, _ = train_here(job, tmp_path, resume=True)
    assert (again.reason, again.step) == ("early-stop", 8)


def test_an_evaluation_that_is_not_a_number_is_never_the_best(tmp_path: Path):
    job = unverified_job(
        model=ModelSettings("support.training:NanAtFirst"),
        steps=6,
        evaluate=EvaluateSettings(every_steps=2),
        checkpoint=CheckpointSettings(every_steps=100, keep_best="loss"),
    )
    result, _ = train_here(job, tmp_path)
    assert result.best["step"] > 2
    never = dataclasses.replace(job, optimizer=OptimizerSettings("sgd", {"lr": 1e308}))
    assert train_here(never, tmp_path / "never")[0].best is None
    log = [r.event for r in core_events.read(tmp_path / "events" / "rank0.jsonl")]
    assert next(e.metrics["loss"] for e in log if isinstance(e, run_events.Evaluated)) is None


class Noted(torch.nn.Linear):
    """A layer with state of its own kind."""

    def __init__(self, note: object = None) -> None:
        super().__init__(2, 2)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def test_state_of_a_modules_own_kind_is_saved_and_comes_back(tmp_path: Path):
    note = {"name": "x", "sizes": (1, 2.5, None), "tensor": torch.arange(3), "empty": torch.zeros(0, 2)}
    saved = Checkpoint(1, model_state(torch.nn.Sequential(Noted(note), Noted(torch.ones(2)))), {}, {})
    loaded = checkpoints.load(checkpoints.save(tmp_path, saved))
    model = torch.nn.Sequential(Noted(), Noted(torch.zeros(2)))
    checkpoints.load_model_state(model, loaded.model)
    found = model[0].note
    assert (found["name"], found["sizes"]) == ("x", (1, 2.5, None))
    assert torch.equal(found["tensor"], torch.arange(3))
    assert found["empty"].shape == (0, 2)
    assert torch.equal(model[1].note, torch.ones(2))


def unsavable() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), Noted(object()))


def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path):
    settings = unverified_job(model=ModelSettings("test_checkpoint:unsavable"))
    with pytest.raises(JobError, match="2._extra_state of its state_dict, from get_extra_state, is a object"):
        train_here(settings, tmp_path)
