"""From samples to batches: parts of sets, whole batches, collate functions, and inputs in every form."""

from __future__ import annotations

import random
from collections import UserDict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, random_split

from plait.config import make_job
from plait.core.errors import DataError, JobError
from plait.planner.depth import Schedule
from plait.runtime import build
from plait.runtime.evaluate import in_order
from plait.runtime.loading import cut, load
from plait.runtime.samples import DataSource
from plait.runtime.sampling import Position, batches
from plait.runtime.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from support.plans import cut_in_two
from support.training import (
    digits_job,
    largest_difference,
    pipeline_rank,
    saved_weights,
    train_here,
    train_rank,
)
from support.world import run_ranks


class Numbers(Dataset[Any]):
    """Sample i is (i, -i)."""

    def __init__(self, split: str = "train", samples: int = 20) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return torch.tensor([float(index)]), torch.tensor(-index)


def contents(dataset: Any, size: int, loaders: int = 0, ranks: int = 1) -> list[Any]:
    """What each batch holds, as lists, of all ranks in turn."""
    found = []
    for rank in range(ranks):
        order = in_order(len(dataset), size)
        for batch in load(dataset, order, seed=3, rank=rank, world_size=ranks, loaders=loaders):
            inputs, target = batch.content
            found.append((inputs.flatten().tolist(), target.tolist()))
    return found


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize("share", [1, 2, 3])
def test_a_part_of_a_set_gives_its_own_samples_whatever_the_share(share: int, loaders: int) -> None:
    part, _ = random_split(Numbers(), [12, 8], torch.Generator().manual_seed(0))
    expected = [
        ([float(i) for i in part.indices[n : n + share]], [-i for i in part.indices[n : n + share]])
        for n in range(0, 12, share)
    ]
    assert contents(part, share, loaders) == expected
    # Two workers whose shares are that large.
    found = contents(part, 2 * share, loaders, ranks=2)
    assert sorted(found) == sorted(expected)


class Drawing(Numbers):
    """Samples that draw at random, and torch's way to ask for several."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1) + random.random(), torch.tensor(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Asked(Numbers):
    """Counts how samples were asked for."""

    several = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.several += 1
        return [self[index] for index in indices]


def test_torchs_way_to_ask_for_several_samples_is_used_unless_they_draw_at_random() -> None:
    asked = Asked()
    assert contents(asked, 5) == contents(Numbers(), 5)
    assert asked.several == 4
    drawn = {index: x for xs, ys in contents(Drawing(), 7) for x, index in zip(xs, ys)}
    assert drawn == {index: x for xs, ys in contents(Drawing(), 4, ranks=2) for x, index in zip(xs, ys)}
    assert drawn == {i: x for xs, ys in contents(Subset(Drawing(), range(20)), 3) for x, i in zip(xs, ys)}


class Wrong(Numbers):
    """Whole batches under torch's name for lists of samples."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.zeros(len(indices), 1), torch.zeros(len(indices))


def test_a_whole_batch_under_torchs_name_is_told_plaits() -> None:
    with pytest.raises(
        DataError, match="gave 2 items for 5 samples, expected a list of them.*collated_batch"
    ):
        contents(Wrong(), 5)


def pad(samples: list[Any]) -> Any:
    """Texts of unlike length as one tensor, with zeros behind the shorter ones."""
    texts, targets = zip(*samples)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.stack(targets)


class Texts:
    """Texts of unlike length: the target is whether token 1 is in it."""

    def __init__(self, split: str, own: bool = False) -> None:
        self.first = 0 if split == "train" else 100
        if own:
            self.collate_fn = pad

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(2, 9, (), generator=generator))
        text = torch.randint(1, 12, (length,), generator=generator)
        return text, (text == 1).any().long()


class Bag(nn.Module):
    """The mean of the embeddings of all tokens that are no padding, so padding changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        sums = self.embedding(tokens).sum(1)
        return self.out(torch.tanh(self.hidden(sums / (tokens != 0).sum(1, keepdim=True))))


def text_job(**changes: Any) -> TrainSettings:
    return digits_job(
        model=ModelSettings("test_samples:Bag"),
        data=DataSettings("test_samples:Texts", 10, collate_fn="test_samples:pad", **changes),
        steps=6,
        accumulate=2,
        evaluate=EvaluateSettings(every_steps=3),
    )


def test_texts_of_unlike_length_train_with_a_collate_function_on_any_number_of_workers(
    tmp_path: Path,
) -> None:
    one, weights = train_here(text_job(), tmp_path / "one")
    own = replace(text_job(), data=DataSettings("test_samples:Texts", 10, {"own": True}, loaders=2))
    for number, job in enumerate((own, text_job(loaders=2))):
        result, same = train_here(job, tmp_path / str(number))
        assert largest_difference(weights, same) == 0.0
        assert result["test"] == one["test"]
    for result, others in run_ranks(2, train_rank, text_job(loaders=1), tmp_path / "two"):
        assert largest_difference(weights, others) < 1e-12
        assert result["test"]["loss"] == pytest.approx(one["test"]["loss"], abs=1e-12)


def test_texts_of_unlike_length_train_in_a_pipeline(tmp_path: Path) -> None:
    _, weights = train_here(text_job(), tmp_path / "one")
    job = cut_in_two(replace(text_job(), accumulate=1), Schedule.FLUSH, microbatches=2)
    run_ranks(2, pipeline_rank, job, tmp_path / "two")
    assert largest_difference(weights, saved_weights(tmp_path / "two")) < 1e-12


def test_a_part_of_a_set_is_collated_as_the_whole() -> None:
    (batch,) = load(Subset(Texts("train", own=True), [0, 1, 2]), in_order(3, 3), **HERE)
    assert batch.content[0].shape[0] == 3


HERE: dict[str, Any] = {"seed": 0, "rank": 0, "world_size": 1, "loaders": 0}


@pytest.mark.parametrize("loaders", [0, 2])
def test_samples_that_cannot_be_stacked_are_answered_with_collate_fn(loaders: int) -> None:
    with pytest.raises(DataError, match=r"cannot be stacked \(RuntimeError: stack.*data\.collate_fn"):
        list(load(Texts("train"), in_order(30, 10), **{**HERE, "loaders": loaders}))


def test_a_collate_function_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(DataError, match=r"data\.collate_fn: .* no 'padd'; did you mean 'pad'"):
        build.check(replace(text_job(), data=DataSettings("digits", 4, collate_fn="test_samples:padd")))
    with pytest.raises(DataError, match="expected a function that takes a list of samples"):
        build.check(replace(text_job(), data=DataSettings("digits", 4, collate_fn="math:pi")))
    job = {"name": "t", "model": "m:m", "data": {"kind": "digits", "batch_size": 4}, "steps": 1}
    job["data"]["collate_fn"] = "a:b"
    assert make_job(job).settings().data.collate_fn == "a:b"
    with pytest.raises(JobError, match=r"data\.collate_fn: found 3"):
        make_job({**job, "data": {**job["data"], "collate_fn": 3}})


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.left(a) - self.right(b)))


class Pairs:
    """Two inputs a sample, in the form asked for."""

    def __init__(self, split: str, form: str) -> None:
        self.form = form
        self.numbers = torch.randn(40, 2, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        a, b = self.numbers[index]
        forms = {"tuple": (a, b), "list": [a, b], "dict": {"b": b, "a": a}, "user dict": UserDict(b=b, a=a)}
        return forms[self.form], index % 3

    def collate_fn(self, samples: list[Any]) -> Any:
        if self.form != "user dict":
            return torch.utils.data.default_collate(samples)
        inputs = {name: torch.stack([s[0][name] for s in samples]) for name in ("b", "a")}
        return UserDict(inputs), torch.tensor([s[1] for s in samples])


def pairs_job(form: str, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model": ModelSettings("test_samples:TwoInputs"),
        "data": DataSettings("test_samples:Pairs", 8, {"form": form}),
        "optimizer": OptimizerSettings("sgd", {"lr": 0.1}),
        "steps": 12,
    }
    return digits_job(**{**values, **changes})


def plain_loop(form: str) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of a loop as anyone would write it, and the loss on the test split."""
    parts = build.build(pairs_job(form), torch.device("cpu"))
    model, train, test = TwoInputs().double(), Pairs("train", "tuple"), Pairs("test", "tuple")
    model.load_state_dict(parts.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = build_order(12)
    for chosen in order:
        a, b = train.numbers[chosen].double().unbind(1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a, b), torch.tensor([i % 3 for i in chosen])).backward()
        optimizer.step()
    a, b = test.numbers.double().unbind(1)
    loss = nn.functional.cross_entropy(model(a, b), torch.arange(40) % 3)
    return model.state_dict(), loss.item()


def build_order(steps: int) -> list[list[int]]:
    order = batches(Position(), 40, 8, seed=0, shuffle=True, keep_last=True)
    return [list(batch.samples) for batch in islice(order, steps)]


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "user dict"])
def test_several_inputs_in_any_form_train_as_in_a_plain_loop(form: str, tmp_path: Path) -> None:
    weights, loss = plain_loop(form)
    result, found = train_here(pairs_job(form), tmp_path)
    assert largest_difference(found, weights) < 1e-12
    assert result["test"]["loss"] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize(("form", "schedule"), [("tuple", Schedule.FLUSH), ("dict", Schedule.GPIPE)])
def test_several_inputs_train_in_a_pipeline_as_in_a_plain_loop(
    form: str, schedule: Schedule, tmp_path: Path
) -> None:
    weights, loss = plain_loop(form)
    job = cut_in_two(pairs_job(form), schedule, microbatches=2)
    result = run_ranks(2, pipeline_rank, job, tmp_path)[0]
    assert largest_difference(saved_weights(tmp_path), weights) < 1e-12
    assert result["test"]["loss"] == pytest.approx(loss, abs=1e-12)


def test_several_inputs_as_a_tuple_train_on_two_workers_and_under_stash(tmp_path: Path) -> None:
    weights, _ = plain_loop("tuple")
    for _, found in run_ranks(2, train_rank, pairs_job("tuple"), tmp_path / "two"):
        assert largest_difference(found, weights) < 1e-12
    # With one microbatch in flight no weights are old: stash is the plain loop.
    job = cut_in_two(pairs_job("tuple"), Schedule.STASH, microbatches=1, depths={0: 1, 1: 1})
    run_ranks(2, pipeline_rank, job, tmp_path / "stash")
    assert largest_difference(saved_weights(tmp_path / "stash"), weights) < 1e-12


def test_cutting_a_batch_keeps_what_belongs_to_each_sample_together() -> None:
    boxes = [{"boxes": torch.zeros(n, 4), "label": f"{n}"} for n in (3, 4, 1, 2)]
    content = ((torch.arange(4), torch.arange(8).view(4, 2)), boxes)
    pieces = [part for part, _ in cut(content, 4, 2)]
    assert [part[0][0].tolist() for part in pieces] == [[0, 1], [2, 3]]
    assert [part[0][1].shape for part in pieces] == [(2, 2)] * 2
    assert [[one["label"] for one in part[1]] for part in pieces] == [["3", "4"], ["1", "2"]]
    # As many inputs as samples are inputs all the same.
    (first, second), target = next(cut(((torch.arange(2), torch.arange(2)), torch.arange(2)), 2, 2))[0]
    assert (first.tolist(), second.tolist(), target.tolist()) == ([0], [0], [0])
    with pytest.raises(
        DataError, match=r"cannot cut a batch of 4 samples that holds a tensor of shape \(3,\)"
    ):
        list(cut((torch.arange(4), torch.arange(3)), 4, 2))


def test_a_set_that_gives_whole_batches_has_a_name_of_its_own_for_it() -> None:
    source = DataSource(build.data.build("digits", "test"))
    x, y = source.batch(0, [5, 2], seed=0)
    assert torch.equal(x[1], source.dataset[2][0])
    assert y.tolist() == [source.dataset[5][1], source.dataset[2][1]]
