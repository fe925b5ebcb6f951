"""The saved state of a fused module: which states can be loaded, and what they are changed to before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from plait.fusion.dispatch.install import ModuleTensors
from plait.fusion.errors import FusionError


def fit_state(tensors: ModuleTensors, state: dict[str, Any], prefix: str) -> None:
    """Bring a state and the module together: tensors that one of them shares and the other does not.

    Raises FusionError for the state of another number of trials, or of a single model.
    """
    module, trials = tensors.module, tensors.trials.count
    _check_state(module, trials, state, prefix)
    names = {id(tensor): name for name, tensor in tensors.shared.items()}
    every = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in every.items():
        key = f"{prefix}module.{name}"
        if (saved := state.get(key)) is None:
            continue
        shared = names.pop(id(tensor), None)
        if shared is not None and saved.shape == tensor.shape:
            tensor.data = tensor.data.clone()  # the memory may be that of the models
        elif shared is not None and saved.shape == (trials, *tensor.shape):
            tensors.unshare([shared])
        elif tensor.shape == (trials, *saved.shape):
            state[key] = saved.expand(tensor.shape)


def _check_state(module: nn.Module, trials: int, state: Mapping[str, Any], prefix: str) -> None:
    seeds = state.get(f"{prefix}seeds")
    if seeds is not None and len(seeds) != trials:
        raise FusionError(
            f"load_state_dict: found the state of {len(seeds)} trials, expected {trials}; fuse as many "
            f"models first, or bring the array there with keep_trials or add_trials"
        )
    names = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    if seeds is None and names & set(module.state_dict()):
        raise FusionError(
            "load_state_dict: found the state of a single model, expected that of a fused module; load it "
            "into a model and fuse that, or put the model into the array with replace_trial"
        )
