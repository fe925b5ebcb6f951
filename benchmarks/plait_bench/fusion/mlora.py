"""Many adapters by mLoRA's own layers (Ye et al., VLDB 2025): one forward of the base, then each adapter's.

mLoRA itself is not part of this project; a clone of it on PYTHONPATH is imported, which takes Python 3.12.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.errors import InputError

HOW_TO_GET = "needs github.com/TUDB-Labs/mLoRA and Python 3.12: git clone it, add it to PYTHONPATH"
# mLoRA refuses a dropout of 0; this one drops nothing.
_NO_DROPOUT = 1e-12


def mlora_step(
    base: nn.Module, models: Sequence[nn.Module], rate: float
) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """A step of mLoRA with the adapters of PEFT's `models` on `base`, and what clears its gradients.

    Its executor is left out: that makes tokens and a mask of all heads from lists in each step, recomputes
    activations, reads each loss, and has an optimizer for each adapter, all of which takes longer.
    """
    llama, modules, args = _mlora("model.llm.model_llama"), _mlora("model.modules"), _mlora("model.args")
    some = next(base.parameters())
    options = args.LLMModelArgs(_config_for(base))
    options.pad_token_id_, options.device_, options.dtype_ = -1, str(some.device), some.dtype
    model = llama.LlamaModel.convert_model_from_huggingface(base, options)
    trained: list[Tensor] = []
    for index, peft in enumerate(models):
        adapter = {name: _adapter(modules, index, peft, name) for name in model.linears_info()}
        model.load_adapter(adapter)
        trained += [tensor for each in adapter.values() for tensor in each.get_trainable_tensors()]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=some.is_cuda, capturable=some.is_cuda)
    data = args.ModelData([], [], [], False, 0, [])
    data.data_config_ = [args.ModelDataConfig(str(n), "lora", n, n + 1) for n in range(len(models))]

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        tokens = ids.flatten(0, 1)
        mask = llama.precompute_mask(tokens[:1], 1, str(some.device), dtype=some.dtype)
        passed = (tokens, mask, data, False)
        for layer in model.sequential():
            passed = layer.forward(passed)
        pairs = zip(passed[0], tokens)
        losses = torch.stack([F.cross_entropy(logits[:-1], own[1:]) for logits, own in pairs])
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return step, optimizer.zero_grad


def _mlora(name: str) -> Any:
    """A module of mLoRA's, which was written for torch 2.2 and the tensorboard package."""
    if find_spec("tensorboard") is None:
        writers = types.SimpleNamespace(SummaryWriter=object)
        sys.modules.setdefault("torch.utils.tensorboard", writers)  # type: ignore[arg-type]
    torch.List = list  # type: ignore[attr-defined]
    try:
        return importlib.import_module(f"mlora.{name}")
    except (ImportError, SyntaxError) as failure:
        raise InputError(f"{HOW_TO_GET} ({failure})") from None
    finally:
        del torch.List  # type: ignore[attr-defined]


def _config_for(base: Any) -> Any:
    """The base's config with the names that mLoRA reads: transformers 5 moved or emptied some."""
    config = copy.deepcopy(base.config)
    config.rope_theta = config.rope_parameters["rope_theta"]
    config.sliding_window = config.max_position_embeddings
    return config


def _adapter(modules: Any, index: int, peft: nn.Module, name: str) -> Any:
    layer: Any = peft.get_submodule(f"base_model.model.model.{name}")
    factor_a, factor_b = (factors["default"].weight for factors in (layer.lora_A, layer.lora_B))
    rank, inputs = factor_a.shape
    made = modules.LoRA(str(index), inputs, len(factor_b), rank, layer.lora_alpha["default"], _NO_DROPOUT)
    made.init_weight(factor_a, factor_b)
    for tensor in made.get_all_tensors():
        tensor.data = tensor.data.to(factor_a.device)
    return made
