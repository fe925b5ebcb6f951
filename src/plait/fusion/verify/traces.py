"""Which module fails, and what each module returns and gets back in backward: to find where trials part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.tensor import TrialTensor

# The path of no module: where a loss or backward failed.
IN_NONE = "\0"


class FailureTrace:
    """Within, notes in which module of `models` an error was raised."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._paths = _paths(models)
        self._running: list[str] = []
        self._handles: list[Any] = []
        self.failed_in: str | None = None

    def __enter__(self) -> None:
        self._running = []
        self._handles = [
            torch_modules.register_module_forward_pre_hook(self._enter),
            torch_modules.register_module_forward_hook(self._leave),
        ]

    def __exit__(self, kind: object, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is not None:
            # Without one, it was raised by the loss or by backward.
            self.failed_in = self._running[-1] if self._running else IN_NONE

    def _enter(self, part: nn.Module, _: object) -> None:
        if id(part) in self._paths:
            self._running.append(self._paths[id(part)])

    def _leave(self, part: nn.Module, *_: object) -> None:
        if id(part) in self._paths and self._running:
            self._running.pop()


class ModuleTrace:
    """Within, notes what each module of `models` returns, in the order in which they end, and gradients."""

    def __init__(self, models: Sequence[nn.Module], pick: Callable[[Tensor], Tensor]) -> None:
        self._paths = _paths(models)
        self._pick = pick
        self._calls: dict[str, int] = {}
        self.outputs: dict[str, Tensor | None] = {}
        self.gradients: dict[str, Tensor | None] = {}

    def __enter__(self) -> None:
        self._handle = torch_modules.register_module_forward_hook(self._note)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, part: nn.Module, _: object, output: Any) -> None:
        path = self._paths.get(id(part))
        if path is None:
            return
        call = self._calls[path] = self._calls.get(path, -1) + 1
        for number, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor):
                key = f"{path}\0{call}\0{number}"
                self.outputs[key] = self._pick(leaf).detach().clone()
                inner = leaf.stacked if isinstance(leaf, TrialTensor) else leaf
                if leaf.is_floating_point():
                    self.gradients[key] = None
                if inner.requires_grad:
                    inner.register_hook(lambda g, key=key, like=leaf: self._note_gradient(key, g, like))

    def _note_gradient(self, key: str, gradient: Tensor, like: Tensor) -> None:
        wrapped = TrialTensor(gradient, like.trials) if isinstance(like, TrialTensor) else gradient
        before = self.gradients.get(key)
        own = self._pick(wrapped).detach().clone()
        self.gradients[key] = own if before is None else before + own


def slice_of_trial(leaf: Tensor, trial: int) -> Tensor:
    return leaf.stacked[trial] if isinstance(leaf, TrialTensor) else leaf


def _paths(models: Sequence[nn.Module]) -> dict[int, str]:
    return {id(part): path for model in models for path, part in model.named_modules()}
