"""What enters a fused module, trials axis first or shared by all trials, and what leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plait.fusion.dispatch.refusals import refuse_passed_by
from plait.fusion.dispatch.tensor import Trials, TrialTensor, unwrap
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


def enter_trials(trials: Trials, value: Any) -> Any:
    """An argument of a fused module as its models see it: a tensor of all trials as a trial tensor."""
    if isinstance(value, Shared):
        return value.tensor
    if not isinstance(value, Tensor) or isinstance(value, TrialTensor):
        return value
    if value.dim() == 0 or value.shape[0] != trials.count:
        raise FusionError(
            f"fused module: found an input of shape {tuple(value.shape)}, expected the trials axis first: "
            f"({trials.count}, ...); wrap inputs that all trials share as plait.fusion.Shared(x)"
        )
    entered = TrialTensor(value, trials)
    entered.rows_at = getattr(value, "plait_rows_at", 0)
    return entered


def leave_trials(trials: Trials, value: Any) -> Any:
    """A result of a fused module with the trials axis first."""
    if not isinstance(value, Tensor):
        return value
    left = unwrap(value, trials)
    if isinstance(value, TrialTensor) and value.is_passed_by:
        left.register_hook = left.retain_grad = refuse_passed_by  # type: ignore[method-assign]
    if isinstance(value, TrialTensor) and value.rows_at and trials.rows is not None:
        # A loss that uses this tensor later must know that its rows are not the first axis.
        left.plait_rows_at = value.rows_at  # type: ignore[attr-defined]
    return left
