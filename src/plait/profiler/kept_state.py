"""Detects Python state that forwards keep, which stages may not reproduce.

A trace records one forward. The next one may depend on what it leaves behind (a count, a list, an attribute,
a global). So a second forward is run, from the state after the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from plait.data.generators import looks
from plait.profiler.recorder import CallRecorder
from plait.profiler.traced_model import Concern, KeptState
from plait.profiler.watched_values import COUNTING, is_watched, plain, watch
from plait.verification.python_state import Name, PythonState, changed, objects_behind, tensors_in


def python_draws(before: Sequence[object]) -> list[Concern]:
    """The concern about a forward that has drawn from Python or numpy, by the `looks` before it."""
    # Torch's own is first.
    same = looks()[1:] == before[1:]
    what = "draws random numbers of Python or numpy, which stages would repeat each time"
    message = f"the model's forward {what}; draw them with torch, as part of the computation"
    return [] if same else [Concern("", message)]


def changed_state(before: Mapping[Name, Any], state: PythonState) -> list[Name]:
    """The names of the Python state that a forward has changed; a replaced tensor counts as changed."""
    return changed(before, state.tokens(same_tensors=True))


def _describe_module(path: str, module: nn.Module) -> str:
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


@dataclass(frozen=True)
class SecondForward:
    """A second forward after the one recorded in `first`: does it depend on Python state left by that?

    State of a traced module, which stages would not keep, is a concern. State of whole modules is correct on
    one worker; modules that share it must be on the same worker.
    """

    model: nn.Module
    args: Any
    kwargs: Any
    mode: FakeTensorMode
    first: CallRecorder
    state: PythonState

    def find_kept(self, moved: Sequence[Name]) -> tuple[list[Concern], list[KeptState]]:
        """Concerns about `moved`, the state that the first forward changed; and state of whole modules."""
        after_one = self.state.tokens()
        reads = self._watch_counters(moved)
        using_left = self._run_again()
        for root in self.state.roots():
            if (root.path, root.label) in reads:
                root.set(plain(root.get()))
        opened = [name for name in moved if name[0] in self.first.opened]
        if using_left is None:
            return [self._concern(*(opened or moved)[0])], []
        unread = {name for name, read in reads.items() if not read}
        going_on = [name for name in changed(after_one, self.state.tokens()) if name not in unread]
        for path, label in going_on:
            if path in self.first.opened:
                return [self._concern(path, label)], []
        return [], [*self._together(going_on), *(KeptState((path,), _keeps(path)) for path in using_left)]

    def _concern(self, path: str, label: str) -> Concern:
        return Concern(
            path,
            f"forward of {_describe_module(path, self.model.get_submodule(path))} changes {label}, "
            f"on which its next one depends, and stages would not keep it; keep it in a buffer, or give it "
            f"to forward and return it",
        )

    def _watch_counters(self, moved: Sequence[Name]) -> dict[Name, list[bool]]:
        """Replace changed numbers of modules by watched ones, to see whether code does more than count."""
        reads: dict[Name, list[bool]] = {}
        for root in list(self.state.roots()):
            name, value = (root.path, root.label), root.get()
            if name in moved and type(value) in (int, float):
                read = reads[name] = list[bool]()
                root.set(watch(value, functools.partial(read.append, True), COUNTING))
        return reads

    def _run_again(self) -> set[str] | None:
        """The whole modules that use a tensor left by the first forward; None if the calls differ."""
        again = self.run({})
        if again is None or _written(again.graph) != _written(self.first.graph):
            return None
        return again.using_left

    def run(self, others: Mapping[str, Any]) -> CallRecorder | None:
        """Another forward, with other numbers among the inputs, by name; None if it fails."""
        again = CallRecorder(self.model, None, self.first.whole)
        again.follow(self.first, tensors_in(root.get() for root in self.state.roots()))

        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                again.add_input("input", leaf)
        given = [
            again.add_value(leaf.node.name, others.get(leaf.node.name, plain(leaf)))
            if is_watched(leaf)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(given, spec)
        try:
            with torch.enable_grad(), self.mode, enable_python_dispatcher(), again.watching():
                for leaf in pytree.tree_leaves(self.model(*args, **kwargs)):
                    if is_watched(leaf):
                        leaf.on_use()
        except Exception:  # it may use a tensor of the first forward, for example
            return None
        return again

    def _together(self, names: Sequence[Name]) -> list[KeptState]:
        """The state that whole modules change again, each with all modules that refer to it."""
        groups: list[tuple[set[str], set[Any], str]] = []
        for root in self.state.roots():
            if (root.path, root.label) not in names:
                continue
            paths, reached = {root.path}, objects_behind(root)
            for other in [each for each in groups if each[1] & reached]:
                groups.remove(other)
                paths, reached = paths | other[0], reached | other[1]
            groups.append((paths, reached, root.label))
        return [KeptState(tuple(sorted(p)), _keeps(*sorted(p), label=label)) for p, _, label in groups]


def _keeps(*paths: str, label: str = "a tensor that it keeps") -> str:
    return f"forward of {' and '.join(paths)} changes {label}, on which its next one depends"


def note_numbers(forward: SecondForward) -> None:
    """Find numbers among the inputs that code depends on unnoticed, because a C function reads them.

    With other numbers the model must make the same calls, with results of the same shapes.
    """
    first, others = forward.first, dict[str, Any]()
    for leaf in pytree.tree_leaves((forward.args, forward.kwargs)):
        if is_watched(leaf) and not isinstance(leaf, str) and leaf.node.name not in first.looked_at:
            value = plain(leaf)
            others[leaf.node.name] = value + 1 if isinstance(value, int) else value * 1.25 + 0.37
    if not others:
        return
    again = forward.run(others)
    if again is None or _written(again.graph) != _written(first.graph) or _shapes(again) != _shapes(first):
        first.looked_at |= dict.fromkeys(others, "")


def _shapes(recorder: CallRecorder) -> list[Any]:
    return [
        node.meta.get("shape") for node in recorder.graph.nodes if node.op not in ("placeholder", "get_attr")
    ]


class _TorchCalls(TorchFunctionMode):
    """Counts torch calls, except those that freeze parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        freezes = getattr(function, "__self__", None) is Tensor.requires_grad
        self.count += not (freezes or function is Tensor.requires_grad_)
        return function(*args, **(kwargs or {}))


def mode_concerns(opened: Mapping[str, nn.Module], state: PythonState, mode: FakeTensorMode) -> list[Concern]:
    """Traced modules whose `train` does more than set the mode: stages have no such module to call."""
    for path, module in opened.items():
        if type(module).train is nn.Module.train and type(module).eval is nn.Module.eval:
            continue
        before = state.tokens(same_tensors=True)
        for child in module.children():
            # Ignore what submodules do in train().
            vars(child)["train"] = lambda mode=True, child=child: child
        with mode, enable_python_dispatcher(), _TorchCalls() as calls:
            module.train()
            module.eval()
        for child in module.children():
            del vars(child)["train"]
        if calls.count or changed(before, state.tokens(same_tensors=True)):
            return [
                Concern(
                    path,
                    f"train() of {_describe_module(path, module)} does more than set the mode, and "
                    f"stages would not; move that into the modules whose weights it changes",
                )
            ]
    return []


def _written(graph: fx.Graph) -> list[str]:
    """Each call of a graph as text, without the names of values."""
    number = {node: i for i, node in enumerate(n for n in graph.nodes if n.op != "get_attr")}

    def name(item: Any) -> Any:
        return f"%{number.get(item, item.target)}" if isinstance(item, fx.Node) else item

    return [
        repr((node.op, str(node.target), fx.node.map_aggregate((node.args, node.kwargs), name)))
        for node in number
        if node.op != "placeholder"
    ]
