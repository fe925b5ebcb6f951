"""Fake inputs for tracing, whose batch (and sequence) sizes are symbols.

A size read from such a tensor is an expression of symbols, so a trace contains `4 * batch` where the model
computes it, and is valid for every batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from sympy import Expr, Symbol
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy import functions as sizes

from plait.profiler.trace_errors import SourceLine, current_line

# Sizes in a trace: numbers, or expressions of symbols.
Shape = tuple[int | Expr, ...]


@dataclass(frozen=True)
class Branch:
    """A branch that the user's code took, and `holds`, the comparison of sizes that selected it."""

    holds: Any
    line: SourceLine | None


class Sizes(ShapeEnv):
    """The symbols of one trace; records the user's line that fixed a symbol to a number."""

    def __init__(self) -> None:
        # Reading a value from a tensor (`item()`) must fail at that line, not at a later use.
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
        self.fixed: dict[Symbol, tuple[int, SourceLine | None]] = {}
        # Above 0 inside a torch call or a whole module, whose branches are not part of the trace.
        self.silent = 1
        self.branches: list[Branch] = []

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of a comparison of sizes; comparisons by the user's code are recorded."""
        value = super().evaluate_expr(orig_expr, *args, **kwargs)
        if self.silent == 0 and getattr(orig_expr, "free_symbols", None):
            if value in (sympy.true, sympy.false):
                holds = orig_expr if value == sympy.true else sympy.Not(orig_expr)
            else:
                holds = sympy.Eq(orig_expr, value)
            if all(holds != branch.holds for branch in self.branches):
                self.branches.append(Branch(holds, current_line()))
        return value

    def _set_replacement(self, a: Symbol, tgt: Expr, *args: Any, **kwargs: Any) -> None:
        if tgt.is_number and a not in self.fixed:
            self.fixed[a] = (int(tgt), current_line())
        super()._set_replacement(a, tgt, *args, **kwargs)  # type: ignore[no-untyped-call, unused-ignore]


def fake_inputs(
    mode: FakeTensorMode, tensors: Sequence[Tensor], others: Sequence[Sequence[Tensor]] = ()
) -> list[Tensor]:
    """A fake copy of each tensor, with symbols for its free dimensions; equal sizes share a symbol.

    `others` are additional examples of the same inputs; dimensions in which they differ are free too.
    """
    batch = tensors[0].shape[0] if tensors and tensors[0].dim() else None
    stand_in = _unlike(size for tensor in tensors for size in tensor.shape)
    chosen: dict[tuple[int, ...], int] = {(): stand_in}
    fakes = []
    for i, tensor in enumerate(tensors):
        alike = [other[i].shape for other in others if len(other) == len(tensors)]
        alike = [shape for shape in alike if len(shape) == tensor.dim()]
        free = [_is_free(tensor, dim, alike) for dim in range(tensor.dim())]
        sizes = []
        for dim, size in enumerate(tensor.shape):
            is_batch = dim == 0 and size == batch
            in_all = (size, *(shape[dim] for shape in alike))
            sizes.append(stand_in if is_batch else _own_size(in_all, chosen) if free[dim] else size)
        fakes.append(_fake_input(mode, tensor, sizes, free, f"input{i}"))
    return fakes


def _own_size(in_all: tuple[int, ...], chosen: dict[tuple[int, ...], int]) -> int:
    """The size to trace with, for sizes `in_all` examples; different from other sizes."""
    if in_all not in chosen:
        near = [in_all[0], *range(in_all[0] - 1, 1, -1), *range(in_all[0] + 1, in_all[0] + 99)]
        chosen[in_all] = next(size for size in near if size not in chosen.values())
    return chosen[in_all]


def _unlike(sizes: Iterable[int]) -> int:
    """A batch size for tracing that differs from all other sizes, so that they are not confused."""
    used = set(sizes)
    return next(prime for prime in (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41) if prime not in used)


def _fake_input(
    mode: FakeTensorMode, tensor: Tensor, sizes: list[int], free: list[bool], name: str
) -> Tensor:
    from torch._dynamo.source import ConstantSource  # slow to import, and needed only for tracing

    example = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    example.requires_grad_(tensor.requires_grad)
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[
            # Equal sizes of at least two become one symbol ("duck" sizing).
            DimDynamic.DUCK if size > 1 and is_free else DimDynamic.STATIC
            for size, is_free in zip(sizes, free)
        ]
    )
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))


def _is_free(tensor: Tensor, dim: int, others: Sequence[torch.Size]) -> bool:
    """Whether a size may change between batches: the first, and the second of token or mask tensors."""
    if dim == 0 or (dim == 1 and not tensor.is_floating_point()):
        return True
    return any(shape[dim] != tensor.shape[dim] for shape in others)


def shape_of(tensor: Tensor) -> Shape:
    sizes: list[Any] = list(tensor.shape)  # a SymInt is not declared as an int
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def recurrent_shapes(module: nn.RNNBase | nn.RNNCellBase, input: Tensor, hx: object = None) -> Any:
    """The output of a recurrent `module` for fake tensors: torch's fused kernels take no symbolic sizes."""
    if isinstance(module, nn.RNNCellBase):
        anchor = module.weight_hh.flatten()[0]
        states = [input.new_zeros((*input.shape[:-1], module.hidden_size)) + anchor for _ in range(2)]
        return tuple(states) if isinstance(module, nn.LSTMCell) else states[0]
    directions = 2 if module.bidirectional else 1
    # Batch and time axes keep their order; a single sequence has no batch.
    batch = () if input.dim() == 2 else (input.shape[0 if module.batch_first else 1],)
    hidden = module.proj_size or module.hidden_size
    # Makes the result depend on the parameters for autograd.
    anchor = cast("Tensor", module.weight_hh_l0).flatten()[0]
    stack = (directions * module.num_layers, *batch)
    output = input.new_zeros((*input.shape[:-1], directions * hidden)) + anchor
    state = input.new_zeros((*stack, hidden)) + anchor
    if module.mode != "LSTM":
        return output, state
    return output, (state, input.new_zeros((*stack, module.hidden_size)) + anchor)


def is_lstm(function: object, args: Sequence[Any]) -> bool:
    """Whether a call is `torch.lstm` on a plain tensor, as in custom modules."""
    return function is torch.lstm and len(args) == 9 and not isinstance(args[1], Tensor)


def lstm_shapes(
    input: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of `torch.lstm` for fake tensors; see `recurrent_shapes`."""
    both_ways = options[-2]
    anchor = sum(tensor.flatten()[0] for tensor in weights)
    output = input.new_zeros((*input.shape[:-1], hx[0].shape[-1] * (2 if both_ways else 1))) + anchor
    hidden, cell = (state.new_zeros(state.shape) + anchor for state in hx)
    return output, hidden, cell


def write_size(expression: Expr, symbol: Callable[[Symbol], str]) -> str | None:
    """`expression` as Python source; `symbol` writes each symbol. None if it cannot be written."""
    if isinstance(expression, sympy.Integer):
        return str(int(expression))
    if isinstance(expression, (sympy.Float, sympy.Rational)):
        return repr(float(expression))
    if isinstance(expression, Symbol):
        return symbol(expression)
    operator = _OPERATORS.get(type(expression))
    if operator is None:
        return None
    parts = [write_size(argument, symbol) for argument in expression.args]
    if any(part is None for part in parts):
        return None
    return operator([part for part in parts if part is not None])


def _infix(sign: str) -> Callable[[list[str]], str]:
    return lambda parts: "(" + f" {sign} ".join(parts) + ")"


def _call(name: str) -> Callable[[list[str]], str]:
    return lambda parts: f"{name}({', '.join(parts)})"


_OPERATORS: dict[type, Callable[[list[str]], str]] = {
    sympy.Add: _infix("+"),
    sympy.Mul: _infix("*"),
    sympy.Pow: _infix("**"),
    sympy.Max: _call("max"),
    sympy.Min: _call("min"),
    sizes.Max: _call("max"),
    sizes.Min: _call("min"),
    sizes.FloorDiv: _infix("//"),
    sizes.CleanDiv: _infix("//"),
    sizes.Mod: _infix("%"),
    sizes.PythonMod: _infix("%"),
    sizes.IntTrueDiv: _infix("/"),
    sizes.FloatTrueDiv: _infix("/"),
    sizes.FloatPow: _infix("**"),
    sizes.ToFloat: _call("float"),
    sizes.OpaqueUnaryFn_sqrt: lambda parts: f"{parts[0]} ** 0.5",
}
