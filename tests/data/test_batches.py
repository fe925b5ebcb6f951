"""From samples to batches: parts of sets, whole batches, collate functions, and inputs in every form."""

from __future__ import annotations

import random
from collections import UserDict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, random_split

from plait.core.errors import DataError, JobError
from plait.data import fingerprint, generators
from plait.data.batches import DataSource
from plait.data.loader import cut, load
from plait.data.sampler import Position, batches
from plait.data.seeding import seed_all
from plait.measure.profile_job import profile_job
from plait.planner.schedules.in_flight import Schedule
from plait.schema.job import make_job
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import components
from plait.training.engines.pipeline_setup import trace_components
from plait.training.evaluate import in_order
from support.plans import cut_in_two
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import (
    digits_job,
    largest_difference,
    saved_weights,
    train_each,
    train_here,
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


def test_samples_that_run_no_code_of_the_users_are_looked_at_without_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    def aside(looks: Any, seconds: float) -> list[Any]:
        started.append(seconds)
        return list(looks)

    monkeypatch.setattr(fingerprint, "load_aside", aside)
    before = torch.get_rng_state()
    stored = TensorDataset(torch.arange(20.0)[:, None], -torch.arange(20))
    found = fingerprint.take_fingerprints((DataSource(stored), None), seed=0)
    assert started == []
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint.take_fingerprints((DataSource(Numbers()), None), seed=0) == found
    assert len(started) == 1


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


def mixed(samples: list[Any]) -> Any:
    """A batch that is mixed with itself in another order, which is drawn."""
    x, y = default_collate(samples)
    return x + torch.rand(()) * x[torch.randperm(len(x))], y


def test_a_collate_function_draws_the_same_for_the_same_samples_however_they_are_asked_for() -> None:
    wanted = DataSource(Numbers(), mixed).batch(1, [3, 1, 4], seed=0)[0]
    for dataset in (Numbers(), Subset(Numbers(), range(20)), Asked()):
        torch.rand(3)
        assert torch.equal(DataSource(dataset, mixed).batch(1, [3, 1, 4], seed=0)[0], wanted)


class DrawingLater(Numbers):
    """Samples of which only later ones draw, the last ones from a second generator, too."""

    def __getitem__(self, index: int) -> Any:
        drawn = numpy.random.normal() if index > 7 else 0.0
        return drawn + (random.gauss(0, 1) if index > 13 else 0.0), index


@pytest.mark.parametrize("by_memory", [True, False], ids=["memory", "states"])
def test_samples_that_draw_late_are_seeded_and_leave_all_generators_as_they_were(
    by_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generators._memory_shows_draws()
    assert generators._views(generators._NUMPY._bit_generator) is not None
    generators.seed_sample(1 << 60)
    drawn_by_memory = random.gauss(0, 1), random.random(), numpy.random.rand(), torch.rand(()).item()
    if not by_memory:
        monkeypatch.setattr(generators, "_memory_shows_draws", lambda: False)
        monkeypatch.setattr(generators, "_views", lambda twister: None)
    generators.seed_sample(1 << 60)
    assert (
        random.gauss(0, 1),
        random.random(),
        numpy.random.rand(),
        torch.rand(()).item(),
    ) == drawn_by_memory
    seed_all(3)
    wanted = [(numpy.random.normal(), random.gauss(0, 1), torch.rand(()).item()) for _ in range(8)]
    found, drawn = [], []
    seed_all(3)
    for size in (1, 5):
        source, values = DataSource(DrawingLater()), []
        for step, numbers in enumerate(torch.arange(20).split(size)):
            values += source.batch(0, numbers.tolist(), seed=1)[0].tolist()
            if step < 4:  # the loop draws as well: each time the other half of a pair
                found.append((numpy.random.normal(), random.gauss(0, 1), torch.rand(()).item()))
        drawn.append(values)
    assert found == wanted
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 13


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
        model=ModelSettings("test_batches:Bag"),
        data=DataSettings("test_batches:Texts", 10, collate_fn="test_batches:pad", **changes),
        steps=6,
        accumulate=2,
        evaluate=EvaluateSettings(every_steps=3),
    )


def test_texts_of_unlike_length_train_with_a_collate_function(tmp_path: Path) -> None:
    one, weights = train_here(text_job(), tmp_path / "one")
    own = replace(text_job(), data=DataSettings("test_batches:Texts", 10, {"own": True}, loaders=2))
    for number, job in enumerate((own, text_job(loaders=2))):
        result, same = train_here(job, tmp_path / str(number))
        assert largest_difference(weights, same) == 0.0
        assert result.test == one.test


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
        components.check(replace(text_job(), data=DataSettings("digits", 4, collate_fn="test_batches:padd")))
    with pytest.raises(DataError, match="expected a function that takes a list of samples"):
        components.check(replace(text_job(), data=DataSettings("digits", 4, collate_fn="math:pi")))
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
        "model": ModelSettings("test_batches:TwoInputs"),
        "data": DataSettings("test_batches:Pairs", 8, {"form": form}),
        "optimizer": OptimizerSettings("sgd", {"lr": 0.1}),
        "steps": 12,
    }
    return digits_job(**{**values, **changes})


def plain_loop(form: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss on the test split and the weights of a loop as anyone would write it."""
    parts = components.build(pairs_job(form), torch.device("cpu"))
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
    return loss.item(), model.state_dict()


def build_order(steps: int) -> list[list[int]]:
    order = batches(Position(), 40, 8, seed=0, shuffle=True, keep_last=True)
    return [list(batch.samples) for batch in islice(order, steps)]


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "user dict"])
def test_several_inputs_in_any_form_train_as_in_a_plain_loop(form: str, tmp_path: Path) -> None:
    loss, weights = plain_loop(form)
    result, found = train_here(pairs_job(form), tmp_path)
    assert largest_difference(found, weights) < 1e-12
    assert result.test["loss"] == pytest.approx(loss, abs=1e-12)


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
    source = DataSource(components.data.build("digits", "test"))
    x, y = source.batch(0, [5, 2], seed=0)
    assert torch.equal(x[1], source.dataset[2][0])
    assert y.tolist() == [source.dataset[5][1], source.dataset[2][1]]


class Mistaken:
    """A set with one mistake of the kind that people make."""

    def __init__(self, split: str, mistake: str) -> None:
        if split == "test" and mistake == "no split 'test'":
            raise KeyError(split)
        self.mistake = mistake

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        x, y = torch.zeros(4), index % 3
        samples = {
            "no target": (x, None),
            "text": (x, "cat"),
            "fractions": (x, float(y)),
            "double": (x.double().numpy(), y),
        }
        return samples[self.mistake]


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        ("no target", DataError, "a sample's target is None, expected .*loss: model"),
        ("text", JobError, "cross-entropy found a (tuple|list) of 4 str as the target"),
        ("fractions", JobError, r"cross-entropy found a float64 tensor of shape \(4,\).* are integers"),
        ("double", DataError, r"the inputs are float64, the model's weights float32.*astype.*same dtype"),
    ],
)
def test_common_mistakes_in_a_data_set_are_refused_in_a_sentence(
    mistake: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    job = digits_job(
        model=ModelSettings("torch.nn:Linear", {"in_features": 4, "out_features": 3}),
        data=DataSettings("test_batches:Mistaken", 4, {"mistake": mistake}),
        precision="float32",
    )
    with pytest.raises(error, match=words):
        train_here(job, tmp_path)
    if mistake == "double":
        with pytest.raises(error, match=words):
            profile_job(job, 4, repeats=1)


def only_training(split: str) -> Any:
    return Numbers() if split == "train" else None


def test_a_set_without_a_test_split_trains_and_is_not_evaluated(tmp_path: Path) -> None:
    job = digits_job(
        model=ModelSettings("torch.nn:Linear", {"in_features": 1, "out_features": 1}),
        data=DataSettings("test_batches:only_training", 4),
        loss="torch.nn:L1Loss",
        steps=3,
    )
    assert train_here(job, tmp_path)[0].test == {}
    with pytest.raises(JobError, match=r"evaluate\.every_steps: found 2, but .* has no test split"):
        train_here(replace(job, evaluate=EvaluateSettings(every_steps=2)), tmp_path)


def test_a_set_that_fails_for_the_test_split_is_refused_with_what_to_return(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        components.data.build("test_batches:Mistaken", "test", mistake="no split 'test'")
    assert caught.value.__notes__ == [
        "data.kind: test_batches:Mistaken failed for the split 'test'; return None where there is none"
    ]


class Named(NamedTuple):
    label: Any
    name: Any
    scale: Any


class NamedTargets(Pairs):
    """Targets that hold text and a number besides a tensor."""

    def collate_fn(self, samples: list[Any]) -> Any:
        inputs, target = super().collate_fn([(s[0], s[1]) for s in samples])
        return inputs, Named(target, [f"image {int(t)}" for t in target], 2.0)


def named_loss(output: torch.Tensor, target: Named) -> torch.Tensor:
    if target.name != [
        f"image {int(label)}" for label in target.label
    ]:  # an `assert` refers to pytest, and it to all
        raise ValueError(target.name)
    return target.scale * nn.functional.cross_entropy(output, target.label)


class Opaque(Pairs):
    def collate_fn(self, samples: list[Any]) -> Any:
        return super().collate_fn(samples)[0], object()


def test_two_workers_and_stages_take_inputs_and_targets_in_every_form(tmp_path: Path) -> None:
    # With one microbatch in flight no weights are old: stash is the plain loop.
    at_once: dict[str, Any] = {"microbatches": 1, "depths": {0: 1, 1: 1}}
    jobs = {
        "two": pairs_job("tuple"),
        "flush": cut_in_two(pairs_job("tuple"), Schedule.FLUSH, 2),
        "gpipe": cut_in_two(pairs_job("dict"), Schedule.GPIPE, 2),
        "stash": cut_in_two(pairs_job("tuple"), Schedule.STASH, **at_once),
    }
    results = run_ranks(2, train_each, jobs, tmp_path)[0]
    loss, weights = plain_loop("tuple")
    for name in jobs:
        assert largest_difference(saved_weights(tmp_path / name), weights) < 1e-12, name
        assert results[name].test["loss"] == pytest.approx(loss, abs=1e-12), name


def test_so_they_do_with_targets_of_ones_own_class_and_with_text(tmp_path: Path) -> None:
    named = pairs_job("tuple", loss="test_batches:named_loss")
    named = replace(named, data=DataSettings("test_batches:NamedTargets", 8, {"form": "tuple"}))
    text = replace(text_job(), accumulate=1)
    jobs = {
        "named": cut_in_two(named, Schedule.FLUSH, 2),
        "text": text_job(loaders=1),
        "text in stages": cut_in_two(text, Schedule.FLUSH, 2),
    }
    results = run_ranks(2, train_each, jobs, tmp_path)[0]
    expected = {
        "named": loss_and_weights(named, tmp_path / "named alone"),
        "text": loss_and_weights(text, tmp_path / "text alone"),
    }
    for name in jobs:
        loss, weights = expected[name.split()[0]]
        assert largest_difference(saved_weights(tmp_path / name), weights) < 1e-12, name
        assert results[name].test["loss"] == pytest.approx(loss, abs=1e-12), name


def loss_and_weights(job: TrainSettings, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    result, weights = train_here(job, folder)
    return result.test["loss"], weights


def test_a_target_that_cannot_be_sent_is_refused_before_a_pipeline_runs() -> None:
    job = pairs_job("tuple", data=DataSettings("test_batches:Opaque", 8, {"form": "tuple"}))
    parts = components.build(job, torch.device("cpu"))
    with pytest.raises(DataError, match="the target holds a object, which the workers of a pipeline cannot"):
        trace_components(job, parts)


def test_fused_trials_take_several_inputs_and_class_weights(tmp_path: Path) -> None:
    job = pairs_job("tuple", steps=5, loss_args={"weight": [1.0, 3.0, 0.5]})
    sweep = sweep_of("optimizer.lr=0.1,0.2", job=job)
    for trial in sweep_here(sweep, tmp_path / "sweep")["trials"]:
        alone, _ = trial_alone(sweep, trial["values"], tmp_path / str(trial["trial"]))
        assert trial["metrics"]["loss"] == pytest.approx(alone.test["loss"], abs=1e-9)


class Epochs(Dataset[Any]):
    """Samples that say of which epoch and part they are, as set_epoch has told them."""

    def __init__(self) -> None:
        self.sampler = Counts()
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(self.epoch), float(self.sampler.epoch)]), i


class Counts:
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_map_style_set_and_what_it_is_made_of_are_told_the_epoch(loaders: int) -> None:
    source = DataSource(Subset(Epochs(), range(4)))
    order = islice(batches(Position(), 4, 2, seed=0, shuffle=True, keep_last=True), 5)
    found = [b.content[0] for b in load(source, order, seed=0, rank=0, world_size=1, loaders=loaders)]
    assert [x.unique().tolist() for x in found] == [[0.0], [0.0], [1.0], [1.0], [2.0]]


def own_numbers(split: str) -> Dataset[Any]:
    return OwnNumbers()


class OwnNumbers(Dataset[Any]):
    def __init__(self) -> None:
        self.random = random.Random(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 8, 8), self.random.random()), i % 10


@pytest.mark.parametrize("loaders", [0, 2])
def test_samples_that_are_not_the_same_twice_are_warned_of(
    loaders: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("test_batches:own_numbers", "digits"):
        caplog.clear()
        train_here(digits_job(data=DataSettings(kind, 8, loaders=loaders), steps=1), tmp_path / kind)
        warned = "samples are not the same when they are read again" in caplog.text
        assert warned == (kind != "digits")


def written_over(split: str, after: int = 40) -> Dataset[Any]:
    return WrittenOver(after)


class WrittenOver(OwnNumbers):
    """Samples that are others once many were read."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.reads = after, 0

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.reads += 1
        return torch.full((1, 8, 8), 1.0 + (self.reads > self.after)), i % 10


@pytest.mark.parametrize(
    ("after", "steps", "warned"), [(40, 10, 10), (40, 4, None), (100, 20, 16), (150, 20, 20)]
)
def test_samples_that_change_while_they_are_trained_on_are_warned_of(
    after: int, steps: int, warned: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataSettings("test_batches:written_over", 8, {"after": after})
    evaluate = EvaluateSettings(None if steps < 20 else 8)
    train_here(digits_job(data=data, steps=steps, evaluate=evaluate), tmp_path)
    said = [words for words in caplog.messages if "were others when read again after step" in words]
    assert [int(words.partition("after step ")[2].partition(":")[0]) for words in said] == (
        [] if warned is None else [warned]
    )
