"""Loads the state of torch's optimizers without a loss of precision, as resumed and audited steps need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state of torch.optim; numbers, such as NAdam's `mu_product`, stay in their own precision.

    Torch casts them to the type of the weights, so that a resumed run would differ.
    """
    optimizer.load_state_dict(dict(state_dict))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        loaded: dict[str, Any] = optimizer.state.get(parameter, {})
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() == 0 and isinstance(loaded.get(key), Tensor):
                loaded[key] = (
                    loaded[key] if loaded[key].dtype == value.dtype else value.to(loaded[key].device)
                )
