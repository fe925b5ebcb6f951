"""The first fused step of image and sequence models of usual sizes on a GPU, and eager steps after it.

    python benchmarks/first_step.py [--models efficientnet-b0 vit-s] [--trials 8] [--rounds 5] [--wide 32]

Each model has two processes, one after another. The first starts with an empty cache on disk, so that all
kernels are compiled and all ways are measured (`cold`); the second with what the first has kept (`kept`).
Both time the first step of fused trials: forward, loss, backward, Adam, in bfloat16 by autocast. The second
then times eager steps of fused trials and of one model alone, in turn; a speed-up is the time of as many
lone steps over that of the fused one. `--wide 32` times the first steps of so many trials, too. `--device
cpu` tries the script with small models.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.fusion import FusedOptimizer, fuse
from plait_bench.fusion.cases import precision, seconds_of

LIMIT_S = 240.0
LR = 1e-3
Step = Callable[[], Any]


class Logits(nn.Module):
    """The logits of a model of the transformers library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


class DenseBlock(nn.Module):
    """Each layer takes what all before it made, concatenated."""

    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(channels + number * growth),
                nn.ReLU(),
                nn.Conv2d(channels + number * growth, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth),
                nn.ReLU(),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1)


def densenet(blocks: Sequence[int], growth: int) -> nn.Module:
    channels = 2 * growth
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for number, layers in enumerate(blocks):
        parts.append(DenseBlock(channels, layers, growth))
        channels += layers * growth
        if number + 1 < len(blocks):
            parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            parts.append(nn.AvgPool2d(2))
            channels //= 2
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *head, nn.Linear(channels, 10))


class Fire(nn.Module):
    """SqueezeNet's part: few channels, then two convolutions side by side."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.one = nn.Conv2d(squeezed, expanded, 1)
        self.three = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


def squeezenet() -> nn.Module:
    sizes = [(64, 16, 64), (128, 16, 64), (128, 32, 128), (256, 32, 128)]
    sizes += [(256, 48, 192), (384, 48, 192), (384, 64, 256), (512, 64, 256)]
    parts: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for number, size in enumerate(sizes):
        parts += [nn.MaxPool2d(3, 2, 1)] if number in (0, 2, 4) else []
        parts.append(Fire(*size))
    head = [nn.Dropout(0.5), nn.Conv2d(512, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *head)


class Tagger(nn.Module):
    """A classifier of sequences by recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], words: int, size: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, size)
        self.layers = kind(size, size, layers, batch_first=True)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layers(self.table(x))
        return self.head(states[:, -1])


def of_transformers(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options, num_labels=10)
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
        return Logits(model)

    return make


def images(batch: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,)))


def sequences(batch: int, length: int, words: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, words, (batch, length)), torch.randint(0, 10, (batch,)))


_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
_VIT = {"patch_size": 8, "image_size": 64}
_NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
Made = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]
# Each: the model and its batch on a GPU, and a small one to try the script on a CPU.
MODELS: dict[str, tuple[Made, Made]] = {
    "efficientnet-b0": (
        (of_transformers("EfficientNet", **_B0, image_size=64), images(64, 64)),
        (of_transformers("EfficientNet", **_B0, image_size=32), images(2, 32)),
    ),
    "densenet-121": (
        (lambda: densenet((6, 12, 24, 16), 32), images(64, 32)),
        (lambda: densenet((2, 2), 4), images(2, 8)),
    ),
    "squeezenet": ((squeezenet, images(128, 32)), (squeezenet, images(2, 16))),
    "vit-s": (
        (of_transformers("ViT", **_SMALL, **_VIT), images(64, 64)),
        (of_transformers("ViT", **_NARROW, **_VIT), images(2, 64)),
    ),
    "convnext-t": (
        (of_transformers("ConvNext", image_size=64), images(64, 64)),
        (of_transformers("ConvNext", image_size=32, hidden_sizes=[8, 16, 16, 32]), images(2, 32)),
    ),
    "gru": (
        (lambda: Tagger(nn.GRU, 10_000, 256, 2), sequences(64, 64, 10_000)),
        (lambda: Tagger(nn.GRU, 50, 8, 1), sequences(2, 8, 50)),
    ),
    "lstm": (
        (lambda: Tagger(nn.LSTM, 10_000, 256, 2), sequences(64, 64, 10_000)),
        (lambda: Tagger(nn.LSTM, 50, 8, 1), sequences(2, 8, 50)),
    ),
}


def lone_step(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=x.is_cuda)

    def step() -> None:
        optimizer.zero_grad()
        with precision(x.device):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()

    return step


def fused_step(models: Sequence[nn.Module], x: Tensor, y: Tensor) -> Step:
    fused = fuse(models, verify=False)
    optimizer = FusedOptimizer(fused, "adam", lr=[LR * (1 + number) for number in range(len(models))])
    inputs, targets = (torch.stack([each] * len(models)) for each in (x, y))

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)

    def step() -> None:
        optimizer.zero_grad()
        with precision(x.device):
            losses = fused.map(loss_of, fused(inputs), targets)
        losses.sum().backward()
        optimizer.step()

    return step


def measure(name: str, trials: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """The seconds of the first fused step; those of eager steps, if there are rounds."""
    make, data = MODELS[name][0 if device.type == "cuda" else 1]
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.init()
    models = [make().to(device) for _ in range(trials)]
    x, y = (part.to(device) for part in data())
    lone = lone_step(make().to(device), x, y)
    lone()  # torch's own first steps are not counted
    seconds_of(lone, device, inner=1)
    began = time.perf_counter()
    fused = fused_step(models, x, y)
    made_s = time.perf_counter() - began
    fused()
    if device.type == "cuda":
        torch.cuda.synchronize()
    found: dict[str, Any] = {"fuse_s": made_s, "first_s": time.perf_counter() - began - made_s}
    if rounds:
        for _ in range(3):
            fused()
        pairs = [(seconds_of(lone, device), seconds_of(fused, device)) for _ in range(rounds)]
        found["lone_ms"], found["fused_ms"] = (1e3 * statistics.median(each) for each in zip(*pairs))
        found["ratios"] = sorted(trials * alone / together for alone, together in pairs)
    return found


def in_process(name: str, trials: int, rounds: int, cache: Path, device: str) -> dict[str, Any] | str:
    """`measure` in a process with its caches in a folder; in words why there is no result."""
    command = [sys.executable, __file__, "--one", name, "--trials", str(trials)]
    command += ["--rounds", str(rounds), "--device", device]
    caches = {"PLAIT_CACHE": str(cache / "ways"), "TRITON_CACHE_DIR": str(cache / "triton")}
    try:
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"took more than {LIMIT_S:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(name: str, trials: int, rounds: int, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cells = []
        for kind, count in (("cold", 0), ("kept", rounds)):
            found = in_process(name, trials, count, Path(folder), device)
            if isinstance(found, str):
                print(f"{name} x{trials} {kind}: {found}", flush=True)
                return
            cells.append(f"{kind} {found['fuse_s']:5.1f} + {found['first_s']:5.1f} s")
        if rounds:
            low, high = found["ratios"][0], found["ratios"][-1]
            speed = f"{statistics.median(found['ratios']):.2f}x ({low:.2f} to {high:.2f})"
            cells.append(f"alone {found['lone_ms']:7.2f} ms, fused {found['fused_ms']:7.2f} ms: {speed}")
        print(f"{name + f' x{trials}':22}", "  ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wide", type=int, default=0, help="time the first steps of so many trials, too")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one, asked.trials, asked.rounds, torch.device(asked.device))))
        return 0
    print(f"torch {torch.__version__}; {' '.join(sys.argv)}")
    print("seconds to fuse + of the first step; an eager step after it")
    for name in asked.models:
        show(name, asked.trials, asked.rounds, asked.device)
        if asked.wide:
            show(name, asked.wide, 0, asked.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
