"""torch.compile for a fused module: its forward is traced to a graph of plain tensors, which is compiled.

torch.compile on the module itself would break the graph at each operation on trial tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from plait.fusion.errors import FusionError
from plait.fusion.shared import Shared


class CompiledForward:
    """The forward of `fused`, compiled once for each shape and mode; `options` are those of torch.compile."""

    def __init__(self, fused: nn.Module, options: dict[str, Any]) -> None:
        self._fused = fused
        self.options = options
        self._graphs: dict[Any, Callable[..., Any]] = {}

    def forget(self) -> None:
        """Drop the compiled graphs, which contain hyperparameters of the trials."""
        self._graphs.clear()

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of `forward(*args, **kwargs)`, compiled."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, Shared))]
        inputs = [_inner(leaves[index]) for index in indices]
        _check_device(inputs)
        names, tensors = self._state()
        key = (spec, self._key(leaves), self._fused.training, torch.is_grad_enabled())
        if key not in self._graphs:

            def call(state: list[Tensor], given: list[Tensor]) -> Any:
                values = list(leaves)
                for index, tensor in zip(indices, given):
                    values[index] = Shared(tensor) if isinstance(values[index], Shared) else tensor
                some_args, some_kwargs = pytree.tree_unflatten(values, spec)
                with _swapped(self._fused, dict(zip(names, state))):
                    outcome = forward(*some_args, **some_kwargs)
                    # Buffers that the forward reassigns are additional outputs of the graph.
                    now = dict(self._fused.named_buffers())
                    changed = {
                        name: now[name]
                        for name, tensor_before in zip(names, state)
                        if now.get(name, tensor_before) is not tensor_before
                    }
                return outcome, changed

            self._graphs[key] = self._compile(call, tensors, inputs)
        outcome, changed = self._graphs[key](tensors, inputs)
        for name, tensor in changed.items():
            path, _, buffer = name.rpartition(".")
            self._fused.get_submodule(path)._buffers[buffer] = tensor
        return outcome

    def _state(self) -> tuple[list[str], list[Tensor]]:
        named = [*self._fused.named_parameters(), *self._fused.named_buffers()]
        return [name for name, _ in named], [tensor for _, tensor in named]

    def _key(self, leaves: list[Any]) -> tuple[Any, ...]:
        return tuple(
            (type(leaf), *_describe(_inner(leaf))) if isinstance(leaf, (Tensor, Shared)) else repr(leaf)
            for leaf in leaves
        )

    def _compile(
        self, call: Callable[..., Any], state: list[Tensor], inputs: list[Tensor]
    ) -> Callable[..., Any]:
        """Trace `call` on real tensors, then restore the buffers."""
        before = [buffer.clone() for buffer in self._fused.buffers()]
        # Run once without tracing: autotuning must not become part of the graph.
        call(state, inputs)
        graph = make_fx(call, pre_dispatch=True)(state, inputs)
        with torch.no_grad():
            for buffer, value in zip(self._fused.buffers(), before):
                buffer.copy_(value)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        compiled: Callable[..., Any] = torch.compile(graph, **self.options)
        return compiled


def _inner(leaf: Any) -> Tensor:
    tensor: Tensor = leaf.tensor if isinstance(leaf, Shared) else leaf
    return tensor


def _describe(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.requires_grad


def _swapped(module: nn.Module, tensors: dict[str, Tensor]) -> Any:
    """Context in which `module` holds `tensors` in place of its parameters and buffers."""
    from torch.nn.utils.stateless import _reparametrize_module

    return _reparametrize_module(module, tensors)


def _check_device(inputs: list[Tensor]) -> None:
    if any(x.is_cuda for x in inputs) and torch.is_autocast_enabled("cuda"):
        raise FusionError(
            "fused module: in 16 bits on a GPU it uses custom kernels, which torch.compile cannot trace; "
            "capture the step as a CUDA graph (plait.fusion.speed.cuda_graph.CapturedStep), or do not compile"
        )
