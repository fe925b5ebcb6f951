"""What workers average when they synchronize in addition to weights and statistics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.sync.averaging.base import WhenSynchronized
from plait.sync.weight_ema import EMA

# For each tensor of an optimizer's state its type, its shape, and whether it is on its parameter's device.
Layout = dict[str, list[Any]]

# NAdam's product of all momenta.
_PRODUCT = "mu_product"


def rest_of_state(
    store: dist.Store,
    prefix: str,
    weights: Sequence[Tensor],
    buffers: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> list[WhenSynchronized]:
    """A worker's state without weights and statistics; workers that synchronize share `prefix`."""
    return [OptimizerState(store, f"{prefix}/optimizer", weights, optimizer), Counters(buffers, scaler)]


class OptimizerState:
    """The floating tensors of an optimizer's state, the same on all workers that synchronize.

    A worker has no state before its first step, nor for a parameter that it never used. So workers publish
    the layout of their state in the store, under `key`; missing tensors start from zeros, an EMA from the
    weights, NAdam's product from one.
    """

    def __init__(
        self, store: dist.Store, key: str, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self._store = store
        self._key = key
        self._weights = weights
        self._optimizer = optimizer
        self._known: Layout = {}
        self._is_filled = False

    def prepare(self) -> None:
        """Add this worker's layout to the one in the store."""
        self._is_filled = False
        local = self._layout()
        if local.keys() <= self._known.keys():
            return
        text = self._store.compare_set(self._key, "", _text(local)).decode()
        while not local.keys() <= (known := json.loads(text)).keys():
            text = self._store.compare_set(self._key, text, _text({**local, **known})).decode()

    def __call__(self) -> list[Tensor]:
        if not self._is_filled:
            self._fill()
        return list(self._held().values())

    def finish(self) -> None:
        """Do nothing: the tensors are the optimizer's."""

    def _held(self) -> dict[str, Tensor]:
        return {
            f"{number}/{name}": value
            for number, weight in enumerate(self._weights)
            for name, value in sorted(self._optimizer.state.get(weight, {}).items())
            if isinstance(value, Tensor) and value.is_floating_point()
        }

    def _layout(self) -> Layout:
        return {
            path: [
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                self._is_per_element(path, value),
            ]
            for path, value in self._held().items()
        }

    def _is_per_element(self, path: str, value: Tensor) -> bool:
        return value.device == self._weights[int(path.partition("/")[0])].device

    def _fill(self) -> None:
        if self._store.check([self._key]):
            self._known = json.loads(self._store.get(self._key))
        held = self._held()
        for path, (dtype, shape, is_per_element) in self._known.items():
            number, _, name = path.partition("/")
            weight = self._weights[int(number)]
            # Counters such as Adam's may be on the CPU, whatever device the weights are on.
            device = weight.device if is_per_element else torch.device("cpu")
            if path not in held:
                start = 1.0 if name == _PRODUCT else 0.0
                first = torch.full(shape, start, dtype=getattr(torch, dtype), device=device)
                self._optimizer.state[weight][name] = weight.detach().clone() if name == EMA else first
        self._is_filled = True


def _text(layout: Layout) -> str:
    return json.dumps(layout, separators=(",", ":"))


class Counters:
    """The numbers of a worker's state that are no floating-point tensors: integer buffers, the loss scale.

    Workers take their mean; integers are rounded.
    """

    def __init__(self, buffers: Sequence[Tensor], scaler: torch.amp.GradScaler) -> None:
        self._buffers = [b for b in buffers if b.dim() == 0 and not b.is_floating_point()]
        self._scaler = scaler
        self._numbers = torch.zeros(0, dtype=torch.float64)

    def prepare(self) -> None:
        numbers = [float(buffer) for buffer in self._buffers]
        if scale := self._scaler.state_dict():
            numbers += [scale["scale"], scale["_growth_tracker"]]
        self._numbers = torch.tensor(numbers, dtype=torch.float64)

    def __call__(self) -> list[Tensor]:
        return [self._numbers] if self._numbers.numel() else []

    def finish(self) -> None:
        numbers = self._numbers.tolist()
        for buffer, number in zip(self._buffers, numbers):
            buffer.fill_(round(number))
        if scale := self._scaler.state_dict():
            *_, size, steps = numbers
            self._scaler.load_state_dict({**scale, "scale": size, "_growth_tracker": round(steps)})
