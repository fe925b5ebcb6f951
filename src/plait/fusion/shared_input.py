"""Inputs that all trials share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plait.fusion.errors import FusionError


@dataclass(frozen=True)
class Shared:
    """Marks `tensor`, an input without the trials axis, as the same for all trials.

    Examples:
        ```python
        fused = plait.fuse([nn.Linear(8, 1) for _ in range(3)])
        fused(plait.Shared(torch.randn(4, 8))).shape  # (3, 4, 1)
        ```
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise FusionError(
                f"Shared: found a {type(self.tensor).__name__}, expected a tensor; wrap each tensor "
                f"separately, as in {{name: Shared(x) for name, x in batch.items()}}"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "a function")
        raise FusionError(
            f"{name}: found a Shared, which only a fused module can take; expected "
            f"fused.map({name}, output, Shared(target))"
        )
