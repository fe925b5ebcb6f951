"""Many LoRA adapters on one frozen model: fused, against PEFT one by one, compiled, by vmap and by mLoRA.

    python benchmarks/adapters_gpu.py [--sizes 0.5b 1.5b] [--trials 32] [--rounds 5] [--modes ...]

Each trial has a LoRA of rank 8 on all seven projections of a Qwen2 of random weights in bfloat16, adapters
in float32, 512 tokens, and AdamW. A step is forward, loss, backward and update of all trials; a mode of one
trial counts as many times as there are trials. Rounds go through all modes in turn. `--sizes tiny --device
cpu` tries the script itself. `--profile 40` prints the kernels of a fused step by their time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from plait.fusion import CapturedStep, FusedOptimizer, fuse
from plait_bench.fusion.cases import finish, seconds_of
from plait_bench.fusion.mlora import mlora_step

_SHAPES = {
    "tiny": (32, 2, 4, 2, 64, 128),
    "0.5b": (896, 24, 14, 2, 4864, 151_936),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936),
}
_NAMES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size",
)  # fmt: skip
SIZES = {size: dict(zip(_NAMES, shape)) for size, shape in _SHAPES.items()}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODES = ("serial", "compiled", "vmap", "mlora", "mlora-captured", "fused", "captured")
# What PEFT alone reaches with one trial counts once for each.
OF_ONE = ("serial", "compiled")
LR = 1e-4

Step = Callable[[], Any]


def base_of(size: str, device: torch.device) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    with device:
        config = Qwen2Config(
            **SIZES[size], tie_word_embeddings=True, use_cache=False, max_position_embeddings=2048
        )
        made: nn.Module = Qwen2ForCausalLM(config).to(torch.bfloat16)
        return made


def adapted(base: nn.Module, trials: int) -> list[nn.Module]:
    """A PEFT model for each trial, on the very tensors of `base`."""
    from peft import LoraConfig, get_peft_model

    held = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    config = LoraConfig("CAUSAL_LM", r=8, lora_alpha=16, target_modules=PROJECTIONS)
    first = get_peft_model(copy.deepcopy(base, dict(held)), config)
    # Copies are made faster than further ones; all adapters begin with the same values.
    return [first, *(copy.deepcopy(first, dict(held)) for _ in range(trials - 1))]


def adapters_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def lone_step(model: nn.Module, tokens: Tensor, compiled: bool) -> tuple[Callable[[Tensor], Tensor], Step]:
    on_gpu = tokens.device.type == "cuda"
    optimizer = torch.optim.AdamW(adapters_of(model), lr=LR, fused=on_gpu, capturable=on_gpu and compiled)
    called = torch.compile(model) if compiled else model

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer.zero_grad


def fused_step(models: Sequence[nn.Module]) -> tuple[Callable[[Tensor], Tensor], Step]:
    fused = fuse(models, verify=False)
    optimizer = FusedOptimizer(fused, "adamw", lr=[LR * (1 + n) for n in range(len(models))])

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: Tensor = fused(input_ids=ids, labels=ids).loss
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return step, optimizer.zero_grad


def vmap_step(models: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """Adapters stacked, the base as it is, by torch.func.vmap."""
    first = models[0]
    names = [name for name, parameter in first.named_parameters() if parameter.requires_grad]
    own = [dict(model.named_parameters()) for model in models]
    stacked = {name: torch.stack([each[name].detach() for each in own]).requires_grad_() for name in names}
    optimizer = torch.optim.AdamW(list(stacked.values()), lr=LR, fused=next(iter(stacked.values())).is_cuda)

    def one(adapter: dict[str, Tensor], ids: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(
            first, adapter, kwargs={"input_ids": ids, "labels": ids}
        ).loss
        return loss

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: Tensor = torch.func.vmap(one, randomness="different")(stacked, ids)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return step


def make(mode: str, base: nn.Module, models: Sequence[nn.Module], tokens: Tensor) -> Step:
    if mode in OF_ONE:
        step, clear = lone_step(models[0], tokens[0], mode == "compiled")
        tokens = tokens[0]
    elif mode == "vmap":
        step = vmap_step(models)
    elif mode.startswith("mlora"):
        step, clear = mlora_step(base, models, LR)
    else:
        step, clear = fused_step(models)
    if mode in ("compiled", "captured", "mlora-captured") and tokens.is_cuda:
        captured = CapturedStep(step, [tokens], warm_up=3, clear=clear)
        return lambda: captured(tokens)
    return lambda: step(tokens)


def show_profile(step: Step, device: torch.device, most: int) -> None:
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as profiler:
        step()
        finish(device)
    on_gpu = device.type == "cuda"
    rows = [row for row in profiler.key_averages() if not on_gpu or row.device_type.name == "CUDA"]

    def time_of(row: Any) -> float:
        return float(row.self_device_time_total if on_gpu else row.self_cpu_time_total)

    total = sum(map(time_of, rows))
    print(f"{total / 1e3:.2f} ms, {sum(row.count for row in rows)} kernels")
    for row in sorted(rows, key=time_of, reverse=True)[:most]:
        print(f"  {time_of(row) / 1e3:9.3f} ms {row.count:6} x {row.key[:150]}")


def measure(size: str, asked: argparse.Namespace, device: torch.device) -> None:
    base, trials = base_of(size, device), asked.trials
    ids = torch.randint(SIZES[size]["vocab_size"], (trials, 1, asked.tokens), device=device)
    steps: dict[str, Step] = {}
    for mode in asked.modes:
        began = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            step = make(mode, base, adapted(base, 1 if mode in OF_ONE else trials), ids)
            step()
            finish(device)
        except Exception as failure:  # other modes are measured all the same
            print(f"{size} {mode}: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        steps[mode] = step
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        print(f"{size} {mode}: ready in {time.perf_counter() - began:.1f} s, peak {peak:.1f} GB", flush=True)
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(asked.rounds):
        for mode in list(times):
            count = trials if mode in OF_ONE else 1
            try:
                times[mode].append(1e3 * seconds_of(steps[mode], device, inner=3) * count)
            except torch.OutOfMemoryError:  # the graphs of other modes keep memory
                print(f"{size} {mode}: out of memory beside the others: measure it alone, with --modes")
                del times[mode], steps[mode]
    for mode, own in times.items():
        middle = statistics.median(own)
        ratios = [f"{statistics.median(times[of]) / middle:.2f}x over {of}" for of in OF_ONE if of in times]
        print(f"{size} x{trials} {mode:14} {middle:9.2f} ms ({min(own):.2f} to {max(own):.2f})", *ratios)
    if asked.profile and "fused" in steps:
        show_profile(steps["fused"], device, asked.profile)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b"], choices=list(SIZES))
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="of each trial")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    asked = parser.parse_args()
    device = torch.device(asked.device)
    print(f"torch {torch.__version__}; {' '.join(sys.argv)}", flush=True)
    for size in asked.sizes:
        measure(size, asked, device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
