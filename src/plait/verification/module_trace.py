"""Records the inputs and outputs of each module, to locate where two models differ or where one fails."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree

from plait.verification.compare import find_differences, measure_noise

# The path if a loss or backward failed, outside of all modules.
IN_NONE = "\0"
# Unwraps a candidate's tensor: the tensor that has gradients, and a function that selects one trial's part.
Unwrap = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


def failed_in(failure: BaseException, models: Sequence[nn.Module]) -> str:
    """The path of the innermost module of `models` whose call raised an error, or IN_NONE."""
    paths, path = _paths(models), IN_NONE
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        if frame.f_code is nn.Module._call_impl.__code__:
            path = paths.get(id(frame.f_locals["self"]), path)
    return path


class ModuleTrace:
    """Context that records the input and output tensors of each module inside of `models`, after its call.

    `calls` counts the calls by path; `gradients` are those of the outputs.
    """

    def __init__(
        self, models: Sequence[nn.Module], unwrap: Unwrap = lambda leaf: (leaf, lambda tensor: tensor)
    ) -> None:
        self._paths = {key: path for key, path in _paths(models).items() if path}
        self._unwrap = unwrap
        self.calls: Counter[str] = Counter()
        # Keyed by path, number of the call, and which input or output.
        self.values: dict[str, Tensor | None] = {}
        self.gradients: dict[str, Tensor | None] = {}

    def __enter__(self) -> None:
        self._handle = torch_modules.register_module_forward_hook(self._note, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path = self._paths.get(id(part))
        if path is None:
            return
        call = self.calls[path]
        self.calls[path] += 1
        for number, leaf in enumerate(_tensors((args, kwargs))):
            tensor, pick = self._unwrap(leaf)
            self.values[f"{path}\0{call}\0input {number}"] = pick(tensor).detach().clone()
        for number, leaf in enumerate(_tensors(output)):
            key = f"{path}\0{call}\0output {number}"
            tensor, pick = self._unwrap(leaf)
            self.values[key] = pick(tensor).detach().clone()
            if tensor.is_floating_point():
                self.gradients[key] = None
            if tensor.requires_grad:
                tensor.register_hook(lambda g, key=key, pick=pick: self._note_gradient(key, pick(g)))

    def _note_gradient(self, key: str, gradient: Tensor) -> None:
        before, added = self.gradients.get(key), gradient.detach().clone()
        self.gradients[key] = added if before is None else before + added


def differing_keys(
    expected: ModuleTrace, moved: Sequence[ModuleTrace], actual: ModuleTrace, kind: str, rounding: float = 0.0
) -> list[str]:
    """The keys in which the `values` or `gradients` of `actual` differ, in order, for modules called by both.

    `moved` are traces from perturbed weights; `rounding` as in `measure_noise`.
    """
    wanted = {key: value for key, value in getattr(expected, kind).items() if path_of(key) in actual.calls}
    noise = measure_noise(wanted, lambda seed: getattr(moved[seed], kind), rounding)
    observed = {key: value for key, value in getattr(actual, kind).items() if key in wanted}
    return [difference.name for difference in find_differences(wanted, observed, noise)]


def path_of(key: str) -> str:
    """The module path in a key of a trace."""
    return key.partition("\0")[0]


def _tensors(tree: Any) -> Iterable[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _paths(models: Sequence[nn.Module]) -> dict[int, str]:
    return {id(part): path for model in models for path, part in model.named_modules()}
