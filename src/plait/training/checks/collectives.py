"""Refuses collectives in user code that only some of the workers run, where they would wait forever."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from plait.core.errors import JobError

_NAMESPACES = ("c10d", "_c10d_functional")


class CollectiveError(JobError):
    """A collective that not all workers would join."""


class RefusedCollectives(TorchDispatchMode):
    """Context in which torch.distributed's collectives raise a CollectiveError that begins with `caller`."""

    def __init__(self, caller: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._caller = caller

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch disables its compiler here, for which it would import it first: a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            raise CollectiveError(
                f"{self._caller} calls {func.overloadpacket.__name__.rstrip('_')} of torch.distributed, but "
                f"not all workers compute it at the same time, so it would wait for the others until the "
                f"timeout; return (sum, count) of the batch, which are summed over workers"
            )
        return func(*args, **(kwargs or {}))
