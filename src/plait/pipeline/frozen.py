"""Parameters that change between frozen and trained during a run, which its optimizer cannot follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.nn import Parameter

from plait.core.errors import JobError


class FrozenAtStart:
    """The parameters that were frozen when the run began: no optimizer holds them, and nobody sums them."""

    def __init__(self, named: Iterable[tuple[str, Parameter]]) -> None:
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]

    def check(self) -> None:
        """Refuse to go on without a word where one of them is to be trained now."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise JobError(
                    f"model: parameter {name!r} was frozen when the run began and requires a gradient now, "
                    f"but only what is trained from the start is in the optimizer; expected it to stay "
                    f"frozen; let the factory leave it trained, or train it in another run"
                )


def check_still_trained(named: Mapping[str, Parameter], frozen: Sequence[Parameter]) -> None:
    """Refuse parameters that were frozen in one version of the weights: the next would not know of it."""
    lost = {id(parameter) for parameter in frozen}
    for name, parameter in named.items():
        if id(parameter) in lost:
            raise JobError(
                f"model: parameter {name!r} was frozen during the run, which schedules with several versions "
                f"of the weights (stash, 2bw) cannot follow; use schedule flush, or freeze it from the start"
            )
