"""Weight versions: an update writes into the next buffer of a ring, so microbatches in flight keep theirs.

Autograd remembers the weights a microbatch went forward with, and refuses to go backward once they were
written over. So each version has leaf parameters of its own, put into the module before a forward, and the
optimizer's first write to a parameter lands in a buffer that nobody uses. No optimizer has to know of it:
those of torch.optim write to the parameters themselves, where the write can be sent elsewhere; for others,
which may write to `p.data` or replace it, the weights are copied first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from plait.core.errors import JobError
from plait.verification.python_state import places_of_tensors

# What an optimizer writes a parameter with, and the same writing elsewhere.
_ELSEWHERE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.add_.Tensor: torch.add,
    torch.ops.aten.sub_.Tensor: torch.sub,
    torch.ops.aten.mul_.Tensor: torch.mul,
    torch.ops.aten.addcdiv_.default: torch.addcdiv,
    torch.ops.aten.addcmul_.default: torch.addcmul,
}


@dataclass
class _Version:
    """The leaves of one version, by the parameters they stand for, and how many microbatches need them."""

    leaves: list[Parameter]
    users: int = 0


@dataclass(frozen=True)
class _Slot:
    """A place where a parameter hangs: in a module or, by its key, in a list, a dict or an object of one."""

    owner: Any
    name: Any
    index: int

    def put(self, parameter: Parameter) -> None:
        if isinstance(self.owner, nn.RNNBase):
            # It keeps a list of its weights besides, which only setting the attribute renews.
            setattr(self.owner, self.name, parameter)
        elif isinstance(self.owner, nn.Module):
            self.owner._parameters[self.name] = parameter
        elif isinstance(self.owner, (list, dict)):
            self.owner[self.name] = parameter
        else:
            setattr(self.owner, self.name, parameter)


@dataclass
class WeightVersions:
    """The weights of one stage in as many versions as microbatches in flight need.

    `masters` are the parameters that the optimizer holds; their data is always the newest version. Version
    0 is what they hold at the start. `use` is called before a forward, `done` once its backward is over.
    Between two updates, backwards may be on one version or on several: gradients add up.
    """

    module: nn.Module
    masters: Sequence[Parameter]
    newest: int = 0
    _versions: dict[int, _Version] = field(default_factory=dict)
    _free: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = tuple(_find_slots(self.module, self.masters))
        self._versions[self.newest] = self._leaves_of_masters()
        self._in_module: int | None = None

    @property
    def buffers(self) -> int:
        """How many copies of the weights there are, used or free."""
        return len(self._versions) + len(self._free)

    def leaves(self, version: int) -> Sequence[Parameter]:
        """The parameters that a microbatch of `version` leaves its gradients on."""
        return self._versions[version].leaves

    def use(self, version: int) -> None:
        """Put the weights of `version` into the module for a forward, and keep them for its backward."""
        self._versions[version].users += 1
        self.put(version)

    def put(self, version: int) -> None:
        """Let the module compute with `version`, which a microbatch in flight uses."""
        if self._in_module != version:
            self._hang(self._versions[version].leaves)
            self._in_module = version

    def done(self, version: int) -> None:
        """One microbatch less needs `version`."""
        self._versions[version].users -= 1

    def collect(self) -> None:
        """Move the gradients that backwards left on the versions to the masters."""
        self._move_gradients(self.masters)

    def gather(self, version: int) -> dict[Parameter, Parameter]:
        """The leaves of `version`, by their masters, now with the gradients of all versions."""
        leaves = self._versions[version].leaves
        self._move_gradients(leaves)
        return dict(zip(self.masters, leaves))

    def update(self, step: Callable[[], Any], needed_from: int) -> None:
        """Write the next version: `step` is the optimizer's, which writes to the masters in place.

        Forwards still to come use `needed_from` and later versions.
        """
        self._forget(needed_from)
        newest = self.newest
        self.newest += 1
        if newest < needed_from and self._versions[newest].users == 0:
            # Nobody needs what is written over: the same buffers, under the next number.
            step()
            self._versions[self.newest] = self._in_place(self._versions.pop(newest))
            self._in_module = None
            return
        buffers = self._free.pop() if self._free else _memory_like(self.masters)
        if _writes_to_parameters(step):
            with WriteElsewhere(self.masters, buffers):
                step()
        else:
            for master, buffer in zip(self.masters, buffers):
                master.data = buffer.copy_(master.data)
            step()
        self._versions[self.newest] = self._leaves_of_masters()

    def _in_place(self, version: _Version) -> _Version:
        """The version that was written over; new leaves where the optimizer has put other memory in place."""
        pairs = zip(self.masters, version.leaves)
        kept = all(master.data_ptr() == leaf.data_ptr() for master, leaf in pairs)
        return version if kept else self._leaves_of_masters()

    def frozen(self) -> list[Parameter]:
        """The masters that a version's leaf no longer trains: someone froze what hangs in the module."""
        pairs = ((m, leaf) for v in self._versions.values() for m, leaf in zip(self.masters, v.leaves))
        return [master for master, leaf in pairs if master.requires_grad and not leaf.requires_grad]

    def restore_masters(self) -> None:
        """Put the masters themselves back into the module; nothing is in flight any more."""
        assert all(version.users == 0 for version in self._versions.values()), "microbatches in flight"
        self._forget(self.newest)
        self._hang(self.masters)
        self._in_module = None

    def restart(self) -> None:
        """Call what the masters hold now version 0: after a drained pipeline, or a checkpoint's weights."""
        self.restore_masters()
        self._versions = {0: self._leaves_of_masters()}
        self.newest = 0

    def _forget(self, needed_from: int) -> None:
        """Recycle the buffers of versions that nobody will use."""
        for number in [n for n, v in self._versions.items() if n < min(needed_from, self.newest)]:
            if self._versions[number].users == 0:
                version = self._versions.pop(number)
                self._free.append([leaf.data for leaf in version.leaves])
                if self._in_module == number:
                    self._in_module = None

    def _move_gradients(self, targets: Sequence[Parameter]) -> None:
        for version in self._versions.values():
            for target, leaf in zip(targets, version.leaves):
                if leaf.grad is not None and leaf is not target:
                    target.grad = leaf.grad if target.grad is None else target.grad.add_(leaf.grad)
                    leaf.grad = None

    def _leaves_of_masters(self) -> _Version:
        leaves = [Parameter(m.data, requires_grad=m.requires_grad) for m in self.masters]
        for master, leaf in zip(self.masters, leaves):
            # The dicts themselves, so that a hook which is removed is removed here, too.
            leaf._backward_hooks = master._backward_hooks
            leaf._post_accumulate_grad_hooks = master._post_accumulate_grad_hooks
        return _Version(leaves)

    def _hang(self, parameters: Sequence[Parameter]) -> None:
        for slot in self._slots:
            slot.put(parameters[slot.index])
        for owner in {slot.owner for slot in self._slots if isinstance(slot.owner, nn.RNNBase)}:
            # Else it would take them for new ones and, on a GPU, move them away from the masters' memory.
            found = [None if weight is None else weakref.ref(weight) for weight in owner._flat_weights]
            owner._flat_weight_refs = found


class WriteElsewhere(TorchDispatchMode):
    """While it is active, the first write to each of `parameters` lands in its buffer instead.

    The buffer then is the parameter's data. A kind of write that cannot be sent elsewhere is preceded by a
    copy, and so is a parameter that nothing was written to at the end.
    """

    def __init__(self, parameters: Sequence[Parameter], buffers: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = {id(p): (p, buffer) for p, buffer in zip(parameters, buffers)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        elsewhere = _ELSEWHERE.get(func)
        if elsewhere is not None and id(args[0]) in self._buffers:
            parameter, buffer = self._buffers.pop(id(args[0]))
            elsewhere(parameter.data, *args[1:], out=buffer, **kwargs)
            parameter.data = buffer
            return parameter
        if func._schema.is_mutable:
            for tensor in _tensors((*args, *kwargs.values())):
                self._copy(id(tensor))
        return func(*args, **kwargs)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        for key in list(self._buffers):
            self._copy(key)

    def _copy(self, key: int) -> None:
        if key in self._buffers:
            parameter, buffer = self._buffers.pop(key)
            parameter.data = buffer.copy_(parameter.data)


def _writes_to_parameters(step: Callable[[], Any]) -> bool:
    """Whether `step` is known to write to the parameters themselves, as all optimizers of torch.optim do."""
    optimizer = getattr(step, "__self__", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    )
    own = all(getattr(hook, "__module__", "").startswith("plait.") for hook in hooks)
    return own and type(optimizer).step.__module__.startswith("torch.optim.")


def _memory_like(masters: Sequence[Parameter]) -> list[Tensor]:
    """New memory for each of `masters`, in one piece where theirs is: so cuDNN wants the weights of RNNs."""
    together: dict[int, list[Parameter]] = {}
    for master in masters:
        together.setdefault(master.untyped_storage().data_ptr(), []).append(master)
    pieces: dict[int, Tensor] = {}
    for place, own in together.items():
        if len(own) > 1 and len({master.dtype for master in own}) == 1:
            count = own[0].untyped_storage().nbytes() // own[0].element_size()
            pieces[place] = own[0].new_empty(count)
    buffers = []
    for master in masters:
        piece = pieces.get(master.untyped_storage().data_ptr())
        shape = master.size(), master.stride(), master.storage_offset()
        buffers.append(torch.empty_like(master) if piece is None else piece.as_strided(*shape))
    return buffers


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _find_slots(module: nn.Module, masters: Sequence[Parameter]) -> Iterator[_Slot]:
    """Every place where one of `masters` hangs; a tied one hangs in several."""
    index = {id(master): i for i, master in enumerate(masters)}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if id(parameter) in index:
                yield _Slot(owner, name, index[id(parameter)])
    for holder, key, tensor in places_of_tensors(dict(module.named_modules())):
        if id(tensor) not in index:
            continue
        if isinstance(holder, tuple):
            raise JobError(
                f"model: a parameter of shape {tuple(tensor.shape)} is kept in a tuple, too, which schedules "
                f"with several versions of the weights (stash, 2bw) cannot follow; keep it in a list, or use "
                f"schedule flush"
            )
        yield _Slot(holder, key, index[id(tensor)])
