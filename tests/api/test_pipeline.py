"""`plait.Pipeline` in a loop of one's own: the steps of a plain loop, under every schedule."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import plait
from plait.core.errors import InputError
from plait.planner.schedules.in_flight import Schedule
from support.pipelines import (
    MODELS,
    Case,
    Delayed,
    Weights,
    build,
    make_optimizer,
    traced_model,
    train_plainly,
)
from support.world import run_ranks

TWO, REPLICAS = (((0,), (1,)),), (((0, 1), (2, 3)),)
FEW = {"steps": 4, "microbatches": 4, "samples": 10}
SYNCHRONOUS = (
    Case("lstm", TWO, Schedule.FLUSH, clip_norm=0.05, **FEW),
    Case("positions", TWO, Schedule.ZERO_BUBBLE, optimizer="sgd", **FEW),
    Case("lstm", (((0,), (1,), (0,), (1,)),), Schedule.INTERLEAVED, **FEW),
)
# Its learning rate is halved after each step.
DECAYING = Case("cnn", TWO, Schedule.STASH, microbatches=1, samples=4, steps=6, optimizer="sgd")
ASYNCHRONOUS = (
    DECAYING,
    Case("positions", TWO, Schedule.TWO_BUFFERED, optimizer="sgd", **FEW),
)
REPLICATED = (Case("lstm", REPLICAS, Schedule.STASH, **FEW),)


class Halved(Delayed):
    """The delayed reference with the learning rates of `DECAYING`, where each batch is an update."""

    def _backward(self, number: int, row: int, total: int) -> None:
        super()._backward(number, row, total)
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number


def train_in_loop(rank: int, cases: tuple[Case, ...]) -> list[tuple[Weights, list[float], list[int]]]:
    """The weights, on rank 0, the losses, and the sizes of microbatches in the last stage, of each case."""
    results = []
    warnings.filterwarnings("error", "Detected call of `lr_scheduler.step")
    for case in cases:
        model = build(case)
        layout = case.pipeline_layout(traced_model(case, model))
        make_batch, loss = MODELS[case.model][1:]
        sizes: list[int] = []
        for parameter in model.parameters():
            parameter.data.mul_(1 + rank)  # the weights of rank 0 are taken
        pipe = plait.Pipeline(
            model,
            [ids[0] for ids in layout.stages[1:]],
            example_inputs=make_batch(case.samples, 0)[0],
            loss=partial(counted_loss, loss, sizes),
            optimizer=partial(make_optimizer, case),
            schedule=case.schedule.value,
            microbatches=case.microbatches,
            clip_norm=case.clip_norm,
            verify=False,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
        losses = []
        for step in range(case.steps):
            batch = make_batch(case.samples, step)
            if rank not in case.layouts[0][0]:
                batch = tree_map(torch.zeros_like, batch)  # only the first stage reads it
            losses.append(pipe.step(*batch))
            if case == DECAYING:
                scheduler.step()
        results.append((as_arrays(pipe.state_dict()), [float(loss) for loss in losses], sizes))
        pipe.close()
    return results


def counted_loss(loss: Callable[..., Tensor], sizes: list[int], output: Any, target: Any) -> Tensor:
    sizes.append(len(tree_leaves(output)[0]))
    return loss(output, target)


def as_arrays(state: dict[str, Any]) -> Weights:
    return {name: value.numpy() for name, value in state.items()}


def assert_equal(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-10, err_msg=name)


def check(cases: tuple[Case, ...], results: list[Any]) -> None:
    for number, case in enumerate(cases):
        delayed = Halved if case == DECAYING else Delayed
        plain = train_plainly(case) if case.schedule.synchronous else delayed(case).train()
        assert_equal(results[0][number][0], plain)
        losses = [rank[number][1] for rank in results]
        assert all(each == losses[0] for each in losses)
        assert all(rank[number][0] == {} for rank in results[1:])
        # Of 10 samples in 4 microbatches; replicas take them in turn.
        all_sizes = [4] if case == DECAYING else [2, 3, 2, 3]
        last = case.layouts[0][-1]
        for replica, rank in enumerate(last):
            assert results[rank][number][2] == all_sizes[replica :: len(last)] * case.steps


def test_schedules_that_drain_give_the_weights_of_a_plain_loop() -> None:
    check(SYNCHRONOUS, run_ranks(2, train_in_loop, SYNCHRONOUS))


def test_schedules_that_never_drain_give_the_weights_of_delayed_gradients() -> None:
    check(ASYNCHRONOUS, run_ranks(2, train_in_loop, ASYNCHRONOUS))


def test_stages_have_replicas() -> None:
    check(REPLICATED, run_ranks(4, train_in_loop, REPLICATED))


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Dropout(0.0),
        nn.Linear(8, 3),
    ]
    return nn.Sequential(*layers).double()


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3)
        for _ in range(count)
    ]


def make_pipe(plan: Any, **options: Any) -> plait.Pipeline:
    example, _ = make_batches(1)[0]
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    arguments = {"loss": F.cross_entropy, "optimizer": optimizer, "microbatches": 2, **options}
    return plait.Pipeline(make_model(), plan, example_inputs=(example,), **arguments)


def train_with_pauses(rank: int) -> tuple[Weights, Weights]:
    """The weights after four steps, and those of a run that another pipeline continues after two."""
    batches = make_batches(4)
    with make_pipe("auto") as pipe:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)
        for batch in batches:
            pipe.step(*batch)
            scheduler.step()
        through = pipe.state_dict()
    with make_pipe(["3"]) as pipe:
        for number, batch in enumerate(batches[:2]):
            pipe.optimizer.param_groups[0]["lr"] = 0.01 * 0.5**number
            pipe.step(*batch)
        model, optimizer = pipe.state_dict(), pipe.optimizer_state_dict()
    with make_pipe(2) as pipe:
        pipe.load_state_dict(model)
        pipe.load_optimizer_state_dict(optimizer)
        for number, batch in enumerate(batches[2:], 2):
            pipe.optimizer.param_groups[0]["lr"] = 0.01 * 0.5**number
            pipe.step(*batch)
        return as_arrays(through), as_arrays(pipe.state_dict())


def test_state_goes_on_in_other_stages_and_in_one_process() -> None:
    through, paused = run_ranks(2, train_with_pauses)[0]
    assert_equal(paused, through)
    with make_pipe(2) as pipe:
        for number, batch in enumerate(make_batches(4)):
            pipe.optimizer.param_groups[0]["lr"] = 0.01 * 0.5**number
            pipe.step(*batch)
        assert_equal(as_arrays(pipe.state_dict()), through)
        make_model().load_state_dict(pipe.state_dict())


def of_few(output: Tensor, target: Tensor) -> Tensor:
    """A mean that leaves samples out, as padding."""
    return F.cross_entropy(output, target, ignore_index=0)


def test_a_loss_that_is_no_mean_over_samples_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for loss, options in ((F.cross_entropy, {}), (of_few, {"verify": False}), (of_few, {"microbatches": 1})):
        make_pipe(1, loss=loss, **options).step(*make_batches(1)[0])
        assert caplog.messages == []
    make_pipe(1, loss=of_few).step(*make_batches(1)[0])
    assert len(caplog.messages) == 1
    assert "as the mean of their parts" in caplog.text


def test_one_process_is_a_plain_loop() -> None:
    plain, (x, y) = make_model(), make_batches(1)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with make_pipe("auto", microbatches=1) as pipe:
        for _ in range(3):
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert f"{pipe.step(x, y):.12g}" == f"{loss.item():.12g}"
        plain.eval()
        assert torch.equal(pipe.evaluate(x), plain(x))
    assert_equal(as_arrays(pipe.state_dict()), as_arrays(plain.state_dict()))
    with pytest.raises(InputError, match="microbatches: found 0, expected at least 1"):
        make_pipe("auto", microbatches=0)
    step = pipe.step(x, y)
    assert 0.0 + step + step == 2 * step > step / 2 > 0.0
    with pytest.raises(InputError, match=r"leave loss\.backward\(\), optimizer\.step\(\) and zero_grad"):
        step.backward()
    assert make_pipe(["4"]).reads_inputs
    with pytest.raises(InputError, match="found .*: there is no layer '4.x'; did you mean '4'"):
        make_pipe(["4.x"])
    inputs = {"example_inputs": (x.float(),), "optimizer": partial(torch.optim.SGD, lr=0.1)}
    narrow = plait.Pipeline(make_model().float(), loss=F.cross_entropy, **inputs)
    with pytest.raises(InputError, match=r"^step: the inputs are float64.*double\(\)"):
        narrow.step(x, y)
    with pytest.raises(InputError, match=r"found the class CrossEntropyLoss, expected .*Loss\(\)"):
        make_pipe("auto", loss=nn.CrossEntropyLoss)
    with pytest.raises(InputError, match=r"loss: it returned a tensor of shape \[\d\], expected .*'mean'"):
        make_pipe("auto", loss=nn.CrossEntropyLoss(reduction="none")).step(x, y)


class Scaled(nn.Module):
    """Scales by a number that a loop may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = make_model(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layers(x) * self.scale
        return scaled


def say_what_is_wrong(rank: int) -> list[str]:
    """The messages for what a newcomer gives by mistake."""
    (x, y), words = make_batches(1)[0], []

    def attempt(call: Callable[[], object]) -> None:
        with pytest.raises(InputError) as raised:
            call()
        words.append(str(raised.value))

    model, optimizer = make_model(), partial(torch.optim.SGD, lr=0.1)
    attempt(lambda: make_pipe(3))
    attempt(lambda: make_pipe(9))
    attempt(lambda: make_pipe("fast"))
    attempt(lambda: make_pipe(["4.x"]))
    attempt(lambda: make_pipe(2, schedule="1f1b"))
    attempt(lambda: make_pipe(2, microbatches=0))
    inputs = {"example_inputs": (x,), "loss": F.cross_entropy, "optimizer": optimizer}
    attempt(lambda: plait.Pipeline(nn.DataParallel(make_model()), 2, **inputs))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    attempt(lambda: plait.Pipeline(model, 2, **inputs))
    attempt(lambda: make_pipe(2, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    attempt(lambda: make_pipe(2, optimizer=lambda parameters: None))
    attempt(lambda: make_pipe(2, schedule="2bw", microbatches=1))
    with make_pipe(2) as pipe:
        attempt(lambda: pipe.step(y, x))
        attempt(lambda: pipe.step(x + rank, y))
        assert pipe.reads_inputs == (rank == 0)
        attempt(lambda: pipe.step(x if pipe.reads_inputs else x[:, :3].to("meta"), y))
        pipe.step(x if pipe.reads_inputs else x.to("meta"), y)
        attempt(lambda: pipe.step(x[:, None].to("meta" if rank else "cpu"), y))
        attempt(lambda: pipe.step(x[: 6 - 2 * rank], y[: 6 - 2 * rank]).item())
        attempt(lambda: pipe.step(x, object()))
        attempt(lambda: pipe.step(x[:0], y[:0]))
        attempt(lambda: pipe.load_state_dict({"0.weight": x}))
    with make_pipe(2, schedule="stash", microbatches=8) as pipe:
        attempt(lambda: pipe.step(x, y))
    scaled = Scaled()
    with plait.Pipeline(scaled, 2, example_inputs=(x,), loss=F.cross_entropy, optimizer=optimizer) as pipe:
        pipe.step(x, y)
        scaled.layers[4].p = 0.1  # code of a layer that is in one stage runs as it is
        pipe.step(x, y)
        scaled.scale = 2.0
        attempt(lambda: pipe.step(x, y))
    return words


EXPECTED = (
    "found 3 stages for 2 workers, expected a divisor or a multiple of 2",
    "found 9 stages, expected 1 to",
    "expected a plan (plait.plan makes one), a number of stages",
    "there is no layer '4.x'; did you mean '4'?; expected a plan (plait.plan makes one), a number of stages",
    "schedule: found '1f1b', expected one of stash, 2bw, flush, gpipe",
    "microbatches: found 0, expected at least 1",
    "model: found a DataParallel, whose workers have equal weights after each step; give it the model itself",
    "0.weight has a hook that is called when its gradient was accumulated",
    "functools.partial(torch.optim.AdamW, lr=1e-3)",
    "optimizer: it returned None",
    "expected a multiple of 2",
    "inputs of shape [6] (int64) and a target of shape [6, 4] (float64), but it is the target that looks",
    "inputs of rank 1 are others than those of rank 0 in the first step; all workers call step with the same "
    "whole batch: leave a DistributedSampler out",
    "inputs of shape [6, 3] (float64) on rank 1, but of shape [6, 4] (float64) on rank 0 in the first step; "
    "all workers call step with the same whole batch, or with tensors of its shapes and types on the meta",
    "found an input of 3 dimensions, where the trace had 2",
    "this worker has a batch of",
    "which the workers of a pipeline cannot send each other",
    "a batch without samples",
    "load_state_dict: '0.weight' has shape (6, 4), that of the model (8, 4)",
    "found a batch of 6 samples, fewer than its 8 microbatches",
    "scale was 1.0 when the model was traced and is 2.0 now",
)


def test_wrong_input_is_explained_on_all_workers() -> None:
    for words in run_ranks(2, say_what_is_wrong):
        for found, expected in zip(words, EXPECTED, strict=True):
            assert expected in found


@pytest.mark.extended
def test_the_example_has_the_same_loss_alone_and_under_torchrun() -> None:
    example = str(Path(__file__).parents[2] / "examples" / "pipeline_loop.py")
    commands = (
        [sys.executable, example],
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", example],
    )
    printed = [
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        for command in commands
    ]
    alone, together = ([line for line in text.splitlines() if "loss" in line] for text in printed)
    assert len(alone) == 3
    assert [round(float(line.split()[-1]), 10) for line in alone] == [
        round(float(line.split()[-1]), 10) for line in together
    ]
