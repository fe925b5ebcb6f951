"""`plait.DataParallel`: the gradients of one process with all samples, whatever the loop does."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import plait
from plait.core.errors import InputError, PeerError, PlaitError
from support.world import run_ranks

# The samples of the two workers in each step.
SHARES = ((3, 2), (1, 4), (0, 5), (2, 3))
TOTAL = 5
Models = Mapping[str, nn.Module]
# Parameters and gradients by name, as lists; None for no gradient.
Values = dict[str, Any]
# Runs backward for the share (x, y) of a rank, with the loss times a scale.
Phase = Callable[[Models, Tensor, Tensor, float, int, int], None]


class Branches(nn.Module):
    """Two layers and two branches, which a forward may leave out; an embedding with sparse gradients."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rows = nn.Embedding(9, 4, sparse=sparse)

    def forward(self, x: Tensor, left: bool = True, reentrant: bool = False) -> Tensor:
        # The first layer is used twice, and each sample adds a row of the embedding.
        x = self.first(x) + self.rows((x[:, 0].detach().abs() * 20).long() % 9)
        layers = nn.Sequential(self.first, nn.Tanh())
        x = checkpoint(layers, x, use_reentrant=True) if reentrant else layers(x)
        return self.second(self.left(x) if left else x)


def plain(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    (mse_loss(models["m"](x), y) * scale).backward()


def unused(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    """`right` is used by nobody, `left` by one worker, in some steps by none."""
    (mse_loss(models["m"](x, left=rank == 1 and step != 1), y) * scale).backward()


def frozen_later(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    inner = models["m"].module if isinstance(models["m"], plait.DataParallel) else models["m"]
    assert isinstance(inner, Branches)
    inner.first.requires_grad_(step in (0, 3))
    plain(models, x, y, scale, rank, step)


def accumulated(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    model = models["m"]
    quiet = model.no_sync() if isinstance(model, plait.DataParallel) else contextlib.nullcontext()
    with quiet:
        plain(models, x, y, scale / 2, rank, step)
    plain(models, x + 1, y, scale / 2, rank, step)


def two_losses(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    out = models["m"](x)
    (mse_loss(out, y) * scale).backward(retain_graph=True)
    (out.abs().mean() * scale).backward()


def penalized(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    x = x.clone().requires_grad_()
    out = models["m"](x)
    (slopes,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    ((mse_loss(out, y) + slopes.square().sum(1).mean()) * scale).backward()


def recomputed(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    (mse_loss(models["m"](x, reentrant=True), y) * scale).backward()


def in_eval_mode(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    models["m"].eval()
    plain(models, x, y, scale, rank, step)


def discriminate(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    fake = models["g"](x).detach()
    (models["d"](fake).square().mean() * scale).backward()
    ((models["d"](x) - 1).square().mean() * scale).backward()


def generate(models: Models, x: Tensor, y: Tensor, scale: float, rank: int, step: int) -> None:
    ((models["d"](models["g"](x)) - 1).square().mean() * scale).backward()


def make_models(kind: str) -> dict[str, nn.Module]:
    torch.manual_seed(7)
    if kind == "gan":
        return {"g": nn.Linear(4, 4).double(), "d": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()}
    return {"m": Branches(sparse=kind == "sparse").double()}


# By name: the phases, each with the model whose optimizer steps after it.
CASES: dict[str, list[tuple[Phase, str]]] = {
    "uneven": [(plain, "m")],
    "sparse": [(plain, "m")],
    "clipped": [(plain, "m")],
    "unused": [(unused, "m")],
    "frozen later": [(frozen_later, "m")],
    "accumulated": [(accumulated, "m")],
    "two losses": [(two_losses, "m")],
    "penalized": [(penalized, "m")],
    "recomputed": [(recomputed, "m")],
    "eval mode": [(in_eval_mode, "m")],
    "gan": [(discriminate, "d"), (generate, "g")],
}


def train(case: str, models: Models, ranks: range, set_to_none: bool = True) -> Values:
    """Parameters and last gradients after a step for each of SHARES, with the samples of `ranks`."""
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if case == "sparse" else 0.9)
        for name, model in models.items()
    }
    for step, sizes in enumerate(SHARES):
        torch.manual_seed(step)
        data = torch.randn(TOTAL, 5, dtype=torch.float64)
        for run_phase, name in CASES[case]:
            for optimizer in optimizers.values():
                optimizer.zero_grad(set_to_none)
            for rank, rows in enumerate(data.split(sizes)):
                # Plain processes leave out shares without samples.
                if rank in ranks and (len(rows) or len(ranks) == 1):
                    scale = len(rows) / TOTAL if len(ranks) == 2 else 1.0
                    run_phase(models, rows[:, :4], rows[:, 4:], scale, rank, step)
            if case == "clipped":
                nn.utils.clip_grad_norm_(models[name].parameters(), 0.05)
            optimizers[name].step()
    return {
        f"{name} {parameter} {what}": None if t is None else t.detach().to_dense().tolist()
        for name, model in models.items()
        for parameter, p in model.named_parameters()
        for what, t in (("grad", p.grad), ("value", p))
    }


def train_worker(rank: int, cases: list[tuple[str, str]]) -> list[Values]:
    found = []
    for case, topology in cases:
        models = {n: plait.DataParallel(m, topology=topology) for n, m in make_models(case).items()}
        # Only `accumulated` keeps zeros, so that gradients of unused parameters differ between the cases.
        found.append(train(case, models, range(rank, rank + 1), case != "accumulated"))
        for model in models.values():
            model.close()
    return found


def assert_equal(found: Values, wanted: Values) -> None:
    found = {name.replace(" module.", " "): value for name, value in found.items()}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            there, here = (torch.tensor(each, dtype=torch.float64) for each in (found[name], value))
            assert (there - here).abs().max() < 1e-12, name


@pytest.mark.parametrize("case", CASES)
def test_workers_have_the_gradients_of_one_process_with_all_samples(case: str):
    wanted = train(case, make_models(case), range(2), case != "accumulated")
    topologies = ["default", "ring"] if case in ("uneven", "gan", "recomputed") else ["default"]
    for found in run_ranks(2, train_worker, [(case, topology) for topology in topologies]):
        for each in found:
            assert_equal(each, wanted)


def make_normalized() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 1))
    model.register_buffer("mask", torch.tensor([True, False]))
    return model


def train_in_turn(rank: int, dtype: torch.dtype) -> list[Values]:
    """The state after the same steps with torch's DistributedDataParallel and with Plait's."""
    states = []
    for wrap in (DistributedDataParallel, plait.DataParallel):
        model = make_normalized().to(dtype)
        if wrap is plait.DataParallel and rank == 1:
            nn.init.zeros_(model.get_parameter("0.weight"))  # rank 0's is copied
        wrapped: Any = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            for part in range(3):
                x = torch.randn(3, 4, dtype=dtype)
                with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                        out = wrapped(x)
                    out.to(dtype).square().mean().backward()
            optimizer.step()
        states.append({name: value.tolist() for name, value in model.state_dict().items()})
    assert list(wrapped.state_dict()) == list(model.state_dict())
    wrapped.load_state_dict(model.state_dict())
    if rank == 0:
        with torch.no_grad():  # an evaluation by one worker alone waits for no other
            wrapped.eval()(torch.ones(2, 4, dtype=dtype))
    return states


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "bfloat16 autocast"])
def test_no_sync_and_batch_norm_do_as_with_torch(dtype: torch.dtype):
    for torchs, ours in run_ranks(2, train_in_turn, dtype):
        assert torchs.keys() == ours.keys()
        assert ours["mask"] == [True, False]
        for name, values in torchs.items():
            there, here = (torch.tensor(each, dtype=torch.float64) for each in (ours[name], values))
            assert (there - here).abs().max() < (1e-13 if dtype == torch.float64 else 1e-6), name


def accumulate(rank: int, samples: int, by_loader: bool) -> tuple[Values, list[str]]:
    """The gradients of an epoch whose batches are all accumulated, after one that was, and warnings."""
    world = plait.init("cpu")
    torch.manual_seed(0)
    x = torch.randn(samples, 3, dtype=torch.float64)
    model = plait.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    loader = plait.DataLoader(TensorDataset(x), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # gradients of the first epoch stay, and count as well
            for number, (rows,) in enumerate(loader):
                if not by_loader:
                    world.batch = (0, 0)
                with model.no_sync() if number + 1 < len(loader) else contextlib.nullcontext():
                    model(rows).square().mean().backward()
    grads = {name: p.grad.tolist() for name, p in model.module.named_parameters() if p.grad is not None}
    model.close()
    return grads, [str(each.message) for each in caught if "no_sync" in str(each.message)]


@pytest.mark.parametrize("samples", [11, 9])  # the last batch is of three samples, and of one
def test_batches_of_a_loader_that_are_accumulated_count_as_in_one_process(samples: int):
    wanted, _ = accumulate(0, samples, True)
    for found, warned in run_ranks(3, accumulate, samples, True):
        assert_equal(found, wanted)
        assert not warned
    for _, warned in run_ranks(2, accumulate, samples, False):
        assert len(warned) == 1


def make_trials(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double() for _ in range(count)]


def train_trials(rank: int) -> list[Values]:
    """The trials of a fused module that workers have trained on shares of its batches."""
    fused = plait.fuse(make_trials(2))
    model = plait.DataParallel(fused)
    optimizer = plait.FusedOptimizer(fused, "sgd", lr=[0.1, 0.3])
    generator = torch.Generator().manual_seed(1)
    for step, shares in enumerate(SHARES):
        x, y = (torch.randn(2, TOTAL, n, dtype=torch.float64, generator=generator) for n in (4, 1))
        own = slice(0, shares[0]) if rank == 0 else slice(shares[0], None)
        xs, ys = (plait.Shared(x[0, own]), plait.Shared(y[0, own])) if step % 2 else (x[:, own], y[:, own])
        optimizer.zero_grad()
        fused.map(mse_loss, model(xs), ys).nan_to_num().sum().backward()
        optimizer.step()
    states = [trial.state_dict() for trial in fused.split()]
    return [{name: value.tolist() for name, value in state.items()} for state in states]


def test_fused_trials_train_as_each_does_on_the_samples_of_all_workers():
    models, generator = make_trials(2), torch.Generator().manual_seed(1)
    for step in range(len(SHARES)):
        x, y = (torch.randn(2, TOTAL, n, dtype=torch.float64, generator=generator) for n in (4, 1))
        for number, (model, lr) in enumerate(zip(models, (0.1, 0.3))):
            optimizer = torch.optim.SGD(model.parameters(), lr)
            mse_loss(model(x[0 if step % 2 else number]), y[0 if step % 2 else number]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for states in run_ranks(2, train_trials):
        for model, state in zip(models, states):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(torch.tensor(state[name], dtype=value.dtype), value)


def draw_fused(rank: int) -> tuple[list[list[float]], list[str]]:
    """What two trials draw on a worker, and why models with them are refused."""
    fused = plait.fuse([nn.Dropout(0.5) for _ in range(2)])
    model = plait.DataParallel(nn.ModuleDict({"own": nn.Linear(1, 1), "trials": fused}), samples=lambda x: 1)
    drawn = model.module["trials"](plait.Shared(torch.ones(32))).tolist()
    refused = []
    for make in (
        lambda: plait.DataParallel(nn.Sequential(fused)),
        lambda: fused.batch_rows(torch.ones(2, 3)),
    ):
        with pytest.raises(PlaitError) as caught, fused.padded([3, 2]):
            make()
        refused.append(str(caught.value))
    return drawn, refused


def test_fused_trials_draw_unlike_numbers_on_each_worker_and_need_their_samples_counted():
    (first, refused), (second, _) = run_ranks(2, draw_fused)
    assert len({str(each) for each in (*first, *second)}) == 4
    assert "holds a fused module, expected samples=" in refused[0]
    assert "trials of unlike sizes" in refused[1]


def one_process(plan: Any, **options: Any) -> plait.Pipeline:
    make = functools.partial(torch.optim.SGD, lr=0.1)
    inputs = (torch.ones(2, 2),)
    loss = nn.functional.mse_loss
    return plait.Pipeline(nn.Linear(2, 2), plan, example_inputs=inputs, loss=loss, optimizer=make, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plait.DataParallel([nn.Linear(2, 2)]), r"found \[Linear.*expected a torch.nn.Module"),
        (lambda: plait.DataParallel(nn.Linear(2, 2), device_ids=[0]), "device_ids is not taken"),
        (lambda: plait.DataParallel(nn.Linear(2, 2), topology="rings"), "did you mean 'ring'"),
        (lambda: plait.DataParallel(plait.DataParallel(nn.Linear(2, 2))), "found a DataParallel, whose"),
        (lambda: plait.DataParallel(nn.Linear(2, 2), samples=3), "samples: found 3, expected a function"),
        # One process cuts nothing, and refuses what several would.
        (lambda: one_process("fast"), "plan: found 'fast', expected a plan"),
        (lambda: one_process(0), "plan: found 0, expected a plan"),
        (lambda: one_process(1, microbatches="4"), "microbatches: found '4', expected at least 1"),
        (lambda: one_process(1, clip_norm=-1.0), "clip_norm: found -1.0, expected a number above 0"),
        (lambda: plait.launch("main.py"), "launch: found 'main.py', expected a function"),
        (lambda: plait.launch(print, workers=1.5), "workers: found 1.5, expected a whole number"),
        (
            lambda: plait.GradientNoiseScale(torch.optim.SGD([torch.ones(1)])),
            "found an optimizer, expected a model",
        ),
        (
            lambda: plait.GradientNoiseScale(plait.DataParallel(plait.fuse([nn.Linear(2, 2)]))),
            "found a fused module, expected one model",
        ),
        (lambda: plait.Averaging(nn.Linear(2, 2), None, ["sma"]), r"sync: found \['sma'\], expected a name"),
        (lambda: plait.DataLoader((torch.ones(9, 2), torch.ones(9)), 3), r"TensorDataset\(inputs, targets\)"),
    ],
)
def test_what_a_newcomer_gives_by_mistake_is_refused_in_words(make: Any, words: str):
    with pytest.raises(InputError, match=words):
        make()


def wrap_wrongly(rank: int) -> list[str]:
    order = [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))]
    wrong: list[tuple[nn.Module, str]] = [
        (nn.Linear(2, 3 + rank), "default"),
        (nn.Linear(2, 3, bias=rank == 0), "default"),
        (nn.ModuleDict(order[::-1] if rank else order), "default"),
        (nn.Linear(2, 3), "rings"),
        (nn.Linear(2, 3).requires_grad_(False), "default"),
    ]
    told = []
    for model, topology in wrong:
        with pytest.raises(InputError) as failure:
            plait.DataParallel(model, topology)
        told.append(str(failure.value))
    counted = plait.DataParallel(nn.Linear(2, 3), samples=lambda x: -len(x))
    with pytest.raises(InputError) as failure:
        counted(torch.ones(4, 2))
    counted.close()
    told.append(str(failure.value))
    # Measured, and then used.
    model = nn.Linear(2, 1, bias=False).double()
    wrapped = plait.DataParallel(model, "auto")
    wrapped(torch.full((1 + rank, 2), 1.0 + rank, dtype=torch.float64)).mean().backward()
    wrapped.close()
    assert model.weight.grad is not None
    assert (model.weight.grad - 5 / 3).abs().max() < 1e-15  # (1 + 2 + 2) / 3
    return told


def test_models_that_differ_are_refused_with_the_first_difference():
    told = run_ranks(2, wrap_wrongly)
    assert told[0] == told[1]
    shape, bias, order, topology, frozen, samples = told[0]
    assert "weight is torch.float32 [3, 2] True on rank 0 and torch.float32 [4, 2] True on rank 1" in shape
    assert "bias is torch.float32 [3] True on rank 0 and not there on rank 1" in bias
    assert "the order of its parameters differs" in order
    assert "rings" in topology
    assert "no parameter of the model requires a gradient" in frozen
    assert "samples returned -4, expected the number of samples" in samples


def change_afterwards(rank: int) -> list[str]:
    """What each change of a model says that was wrapped before, and a copy that trains as the original."""

    def replaced(net: nn.Sequential) -> None:
        net[1] = nn.Linear(4, 1)

    changes: list[Callable[[nn.Sequential], object]] = [
        lambda net: net.double(),
        lambda net: net[0].weight.requires_grad_(True),
        replaced,
        lambda net: net[0].bias.requires_grad_(False),
    ]
    found = []
    for change in changes:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        net[0].weight.requires_grad_(False)
        model = plait.DataParallel(net)
        change(net)
        try:
            model(torch.ones(2, 4, dtype=net[0].weight.dtype)).sum().backward()
            found.append("trains")
        except InputError as failure:
            found.append(str(failure))
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.zero_grad()
        each(torch.full((2, 4), 1.0 + rank)).sum().backward()
    assert copied.module is not model.module
    grads = [[p.grad.tolist() for p in each.parameters() if p.grad is not None] for each in (model, copied)]
    return [*found, *map(str, grads)]


def test_a_model_that_is_changed_after_it_was_wrapped_is_refused_and_a_copy_trains_as_it_does():
    first, second = run_ranks(2, change_afterwards)
    assert first == second
    assert "converted to torch.float64" in first[0]
    assert "0.weight was added, replaced or unfrozen" in first[1]
    assert "1.weight was added" in first[2]
    assert first[3] == "trains"
    assert first[4] == first[5] != "[]"


def loop_wrongly(rank: int) -> list[str]:
    """What loops are told whose hooks update the model, and one whose other worker had fewer batches."""
    told = []
    for zeros in (False, True):
        net = nn.Linear(4, 1)
        model = plait.DataParallel(net)
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def update(parameter: Tensor, steps: dict[Any, Any] = steps, zeros: bool = zeros) -> None:
            steps[parameter].step()
            steps[parameter].zero_grad(set_to_none=not zeros)

        net.bias.register_post_accumulate_grad_hook(lambda parameter: None)
        model(torch.ones(2, 4)).sum().backward()  # a hook that only looks
        net.weight.register_post_accumulate_grad_hook(update)
        with pytest.raises(InputError) as refused:
            model(torch.ones(2, 4)).sum().backward()
        told.append(str(refused.value))
    for net in (nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))):
        model = plait.DataParallel(net)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        if rank == 1:
            model.close()
        else:
            with pytest.raises(PeerError) as failure:
                model(torch.ones(2, 4)).sum().backward()
            told.append(str(failure.value))
    return told


def test_a_loop_that_cannot_be_right_is_told_why():
    first, second = run_ranks(2, loop_wrongly)
    assert first[:2] == second
    for words in second:
        assert "a hook of weight (register_post_accumulate_grad_hook) changes it during backward" in words
    for words in first[2:]:  # the end of the other may be seen in forward, too
        assert "pass 3 of worker 0" in words
        assert "it had fewer batches: all workers run the same number" in words
