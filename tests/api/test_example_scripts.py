"""The example scripts of the library: short, and with the loss of a plain loop, however they are started."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait
from plait.api.world import world_of_one
from plait.planner import Settings
from support.commands import forked_commands
from support.world import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(
    path.name for path in EXAMPLES.glob("*.py") if re.search(r"^import plait$", path.read_text(), re.M)
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
Batches = Iterable[tuple[Tensor, Tensor]]


def run_example(rank: int, name: str, *words: str, run_name: str = "<example>") -> str:
    """What the script prints in this process."""
    path = str(EXAMPLES / name)
    with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch("sys.argv", [path, *words]):
        runpy.run_path(path, run_name=run_name)
    return out.getvalue()


def losses_in(*texts: str) -> list[float]:
    """All losses that were printed, in ascending order: those of several workers come in any."""
    return sorted(float(loss) for text in texts for loss in re.findall(r"loss ([0-9.]+)", text))


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(sizes):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Tensor], batches: Batches
) -> float:
    """Train as PyTorch does; returns the last loss."""
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), target)
        loss.backward()
        optimizer.step()
    return float(loss.item())


def cut(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return [(x[at : at + size], y[at : at + size]) for at in range(0, len(x), size)]


def shuffled(x: Tensor, y: Tensor, size: int, epochs: int) -> Batches:
    loader = plait.DataLoader(TensorDataset(x, y), size, world=world_of_one("cpu"))
    while loader.epoch < epochs:
        yield from loader


def averaging_loop() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 8, dtype=torch.float64)
    y, model = x.sin().sum(1, keepdim=True), net(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plain_steps(model, optimizer, F.mse_loss, cut(x, y, 32) * 5)
    return [F.mse_loss(model(x), y).item()]


def audit_loop() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(128, 8, dtype=torch.float64)
    y, model = x.sin().sum(1, keepdim=True), net(8, 32, 1)
    plain_steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), F.mse_loss, cut(x, y, 32))
    return [F.mse_loss(model(x), y).item()]


def data_parallel() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(101, 8, dtype=torch.float64)
    y, model = x.square().sum(1, keepdim=True), net(8, 16, 1)
    plain_steps(model, torch.optim.Adam(model.parameters(), lr=0.01), F.mse_loss, shuffled(x, y, 12, 5))
    return [F.mse_loss(model(x), y).item()]


def elastic_loop() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(101, 8, dtype=torch.float64)
    y, model = x.square().sum(1, keepdim=True), net(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    plain_steps(model, optimizer, F.mse_loss, shuffled(x, y, 12, 5))
    return [F.mse_loss(model(x), y).item()]


def fused_loop() -> list[float]:
    x = torch.randn(192, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, losses = (x[:, :3] + x[:, 3:6]).argmax(1), []
    for rate in (0.3, 0.1, 0.03, 0.01):
        torch.manual_seed(0)
        model = net(8, 32, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        losses.append(plain_steps(model, optimizer, F.cross_entropy, cut(x, y, 32)))
    return losses


def launch_workers() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(100, 8, dtype=torch.float64)
    y, model = x.square().sum(1, keepdim=True), net(8, 16, 1)
    plain_steps(model, torch.optim.SGD(model.parameters(), lr=0.01), F.mse_loss, shuffled(x, y, 12, 3))
    return [F.mse_loss(model(x), y).item()] * 2


def noise_scale() -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 8, dtype=torch.float64)
    y, model = x.sin().sum(1, keepdim=True) + torch.randn(256, 1, dtype=torch.float64), net(8, 32, 1)
    plain_steps(model, torch.optim.SGD(model.parameters(), lr=0.05), F.mse_loss, shuffled(x, y, 32, 3))
    return [F.mse_loss(model(x), y).item()]


def of_a_pipeline(optimizer: Callable[..., torch.optim.Optimizer], epochs: int) -> list[float]:
    torch.manual_seed(0)
    gelu = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    ).double()
    x, y = torch.randn(240, 16, dtype=torch.float64), torch.randint(0, 4, (240,))
    made = optimizer(gelu.parameters())
    return [plain_steps(gelu, made, F.cross_entropy, cut(x, y, 24)) for _ in range(epochs)]


def pipeline_loop() -> list[float]:
    return of_a_pipeline(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), 3)


def plan_loop() -> list[float]:
    return of_a_pipeline(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1)


LOOPS = (audit_loop, averaging_loop, data_parallel, elastic_loop, fused_loop, noise_scale, pipeline_loop)
PLAIN = {f"{each.__name__}.py": each for each in (*LOOPS, plan_loop)}


def words_of(name: str, folder: Path) -> list[str]:
    """The arguments of a script: where it saves its state, if it does."""
    return [str(folder / "state")] if name == "data_parallel.py" else []


def test_every_script_is_short_and_tested():
    assert set(SCRIPTS) <= {*PLAIN, "launch_workers.py", "lora_sweep.py", "no_loop.py"}
    assert [name for name in SCRIPTS if len((EXAMPLES / name).read_text().splitlines()) >= 40] == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", PLAIN)
def test_a_script_has_the_loss_of_a_plain_loop(name: str, workers: int, tmp_path: Path):
    printed = run_ranks(workers, run_example, name, *words_of(name, tmp_path))
    assert losses_in(*printed) == pytest.approx(sorted(PLAIN[name]()), abs=1e-10)


@pytest.mark.extended
def test_the_adapters_of_a_script_have_the_losses_of_plain_loops_and_peft_loads_them(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'plait[peft]'")
    path = str(EXAMPLES / "lora_sweep.py")
    made = {}

    def alone(models: list[nn.Module]) -> mock.Mock:
        made["models"] = copy.deepcopy(models)
        made["state"] = torch.get_rng_state()
        return fuse(models)

    fuse = plait.fuse
    arguments = mock.patch("sys.argv", [path, str(tmp_path)])
    with mock.patch.object(plait, "fuse", alone), arguments, contextlib.redirect_stdout(io.StringIO()) as out:
        found = runpy.run_path(path)
    torch.set_rng_state(made["state"])
    steps = [(torch.randint(64, (3, 8, 1)) + torch.arange(12)) % 64 for _ in range(20)]
    losses, tokens = [], torch.arange(8).view(1, 8)
    for number, (model, rate) in enumerate(zip(made["models"], (0.03, 0.01, 0.003))):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        batches = ((step[number], step[number]) for step in steps)
        losses.append(plain_steps(model, optimizer, next_token_loss, batches))
        base = transformers.LlamaForCausalLM(found["base"].config).double()
        base.load_state_dict(found["base"].state_dict())
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / f"rank-{found['configs'][number].r}")
        torch.testing.assert_close(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
    assert losses_in(out.getvalue()) == pytest.approx(sorted(losses), abs=1e-10)


def next_token_loss(output: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].mT, tokens[:, 1:])


def test_what_two_workers_have_saved_in_mid_epoch_one_brings_to_the_same_end(tmp_path: Path):
    run_ranks(2, run_example, "data_parallel.py", str(tmp_path / "state"))
    # The checkpoint is one of the last epoch, before its last batch.
    (resumed,) = run_ranks(1, run_example, "data_parallel.py", str(tmp_path / "state"))
    assert losses_in(resumed) == pytest.approx(data_parallel(), abs=1e-10)


def test_workers_of_launch_have_the_loss_of_a_plain_loop():
    with forked_commands():
        printed = run_example(0, "launch_workers.py", run_name="__main__")
    assert losses_in(printed) == pytest.approx(launch_workers(), abs=1e-10)


def steps_under_unlike_plans(rank: int) -> tuple[int, float]:
    torch.manual_seed(0)
    model, x, y = net(4, 8, 8, 2), torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 2, (8,))
    profile, machines = plait.profile(model, x), plait.machines(2, 1e9)
    plan = plait.plan(profile, machines, Settings(straight=rank == 0))
    with contextlib.closing(
        plait.Pipeline(
            model,
            plan,
            example_inputs=(x,),
            loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            schedule="flush",
        )
    ) as pipe:
        return len(pipe.stages), [float(pipe.step(x, y)) for _ in range(2)][-1]


def test_a_pipeline_takes_the_plan_of_rank_0():
    first, other = run_ranks(2, steps_under_unlike_plans)
    assert first == other
    assert first[0] == 2


@pytest.mark.extended  # the tests above run them in processes that have torch
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_holds_under_torchrun(name: str, tmp_path: Path):
    command = [sys.executable, *TORCHRUN, str(EXAMPLES / name), *words_of(name, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == pytest.approx(sorted(PLAIN[name]()), abs=1e-10)


@pytest.mark.extended
def test_workers_of_plait_run_have_the_loss_of_a_plain_loop(tmp_path: Path):
    script = [str(EXAMPLES / "elastic_loop.py")]
    command = [sys.executable, "-m", "plait", "run", "-np", "2", "--run-dir", str(tmp_path), *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    # What workers print is shown apart from the progress, and kept in the run's logs.
    assert losses_in(done.stdout) == pytest.approx(elastic_loop(), abs=1e-10)
