"""Checks for parameters that are frozen or unfrozen during a run, after the optimizer was built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.nn import Parameter

from plait.core.errors import JobError


class FrozenAtStart:
    """The parameters that were frozen when the run began: they are in no optimizer and no all-reduce."""

    def __init__(self, named: Iterable[tuple[str, Parameter]]) -> None:
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]

    def check(self) -> None:
        """Raise JobError if one of them requires a gradient now."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise JobError(
                    f"model: parameter {name!r} was frozen when the run began and requires a gradient now, "
                    f"but the optimizer holds only what required one at the start; expected it to stay "
                    f"frozen; have the factory return it unfrozen, or train it in another run"
                )


def check_still_trained(named: Mapping[str, Parameter], frozen: Sequence[Parameter]) -> None:
    """Raise JobError if a parameter was frozen in one version of the weights: the next would train it."""
    lost = {id(parameter) for parameter in frozen}
    for name, parameter in named.items():
        if id(parameter) in lost:
            raise JobError(
                f"model: parameter {name!r} was frozen during the run, which schedules with several versions "
                f"of the weights (stash, 2bw) do not support; use schedule flush, or freeze it from the start"
            )
