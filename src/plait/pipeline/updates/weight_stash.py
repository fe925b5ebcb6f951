"""Weight versions: an update writes into the next buffer of a ring, so microbatches in flight keep theirs.

Autograd refuses a backward if the weights of the forward were overwritten. So each version has its own leaf
parameters, put into the module before a forward, and the optimizer's first write to a parameter is redirected
into an unused buffer. No optimizer has to know about it. Optimizers of torch.optim write to the parameters
themselves, so their writes can be redirected; for others, which may write to `p.data` or replace it, the
weights are copied first.
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
from plait.verification.python_state import tensor_slots

# In-place operations of optimizers, and their out-of-place versions with an `out` argument.
_OUT_OF_PLACE: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.add_.Tensor: torch.add,
    torch.ops.aten.sub_.Tensor: torch.sub,
    torch.ops.aten.mul_.Tensor: torch.mul,
    torch.ops.aten.addcdiv_.default: torch.addcdiv,
    torch.ops.aten.addcmul_.default: torch.addcmul,
}


@dataclass
class _Version:
    """The leaves of one version, in the order of the masters, and how many microbatches need them."""

    leaves: list[Parameter]
    users: int = 0


@dataclass(frozen=True)
class _Slot:
    """Where a parameter is stored: in a module, or in a list, dict or object of a module."""

    owner: Any
    name: Any
    index: int

    def put(self, parameter: Parameter) -> None:
        if isinstance(self.owner, nn.RNNBase):
            # It also keeps a list of its weights, which only setting the attribute updates.
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
    0 is what they hold at the start. `use` is called before a forward, `done` after its backward. Backwards
    between two updates may use different versions: their gradients are added.
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
        """The number of copies of the weights, used or free."""
        return len(self._versions) + len(self._free)

    def leaves(self, version: int) -> Sequence[Parameter]:
        """The leaf parameters of `version`, which receive the gradients of its microbatches."""
        return self._versions[version].leaves

    def use(self, version: int) -> None:
        """Put the weights of `version` into the module for a forward, and retain them for its backward."""
        self._versions[version].users += 1
        self.put(version)

    def put(self, version: int) -> None:
        """Put the weights of `version`, which a microbatch in flight uses, into the module."""
        if self._in_module != version:
            self._hang(self._versions[version].leaves)
            self._in_module = version

    def done(self, version: int) -> None:
        """Release `version` for one microbatch."""
        self._versions[version].users -= 1

    def collect(self) -> None:
        """Move the gradients of all versions to the masters."""
        self._move_gradients(self.masters)

    def gather(self, version: int) -> dict[Parameter, Parameter]:
        """Move the gradients of all versions to the leaves of `version`; returns them by master."""
        leaves = self._versions[version].leaves
        self._move_gradients(leaves)
        return dict(zip(self.masters, leaves))

    def update(self, step: Callable[[], Any], needed_from: int) -> None:
        """Write the next version: `step` is the optimizer's, which writes to the masters in place.

        Later forwards use version `needed_from` or newer.
        """
        self._forget(needed_from)
        newest = self.newest
        self.newest += 1
        if newest < needed_from and self._versions[newest].users == 0:
            # The current version is unused: overwrite it, under the next number.
            step()
            self._versions[self.newest] = self._in_place(self._versions.pop(newest))
            self._in_module = None
            return
        buffers = self._free.pop() if self._free else _memory_like(self.masters)
        if _writes_to_parameters(step):
            with RedirectWrites(self.masters, buffers):
                step()
        else:
            for master, buffer in zip(self.masters, buffers):
                master.data = buffer.copy_(master.data)
            step()
        self._versions[self.newest] = self._leaves_of_masters()

    def _in_place(self, version: _Version) -> _Version:
        """The overwritten version, with new leaves if the optimizer has replaced memory."""
        pairs = zip(self.masters, version.leaves)
        kept = all(master.data_ptr() == leaf.data_ptr() for master, leaf in pairs)
        return version if kept else self._leaves_of_masters()

    def frozen(self) -> list[Parameter]:
        """The masters whose leaf in some version was frozen, through the module."""
        pairs = ((m, leaf) for v in self._versions.values() for m, leaf in zip(self.masters, v.leaves))
        return [master for master, leaf in pairs if master.requires_grad and not leaf.requires_grad]

    def restore_masters(self) -> None:
        """Put the masters themselves back into the module; nothing is in flight."""
        assert all(version.users == 0 for version in self._versions.values()), "microbatches in flight"
        self._forget(self.newest)
        self._hang(self.masters)
        self._in_module = None

    def restart(self) -> None:
        """Restart at version 0 with the masters' values: after a drain, or after loading a checkpoint."""
        self.restore_masters()
        self._versions = {0: self._leaves_of_masters()}
        self.newest = 0

    def _forget(self, needed_from: int) -> None:
        """Recycle the buffers of versions that are no longer needed."""
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
            # The same dict objects, so that removing a hook removes it here too.
            leaf._backward_hooks = master._backward_hooks
            leaf._post_accumulate_grad_hooks = master._post_accumulate_grad_hooks
        return _Version(leaves)

    def _hang(self, parameters: Sequence[Parameter]) -> None:
        for slot in self._slots:
            slot.put(parameters[slot.index])
        for owner in {slot.owner for slot in self._slots if isinstance(slot.owner, nn.RNNBase)}:
            # Otherwise the RNN would treat them as new and, on a GPU, copy them out of the masters' memory.
            references = [None if weight is None else weakref.ref(weight) for weight in owner._flat_weights]
            owner._flat_weight_refs = references


class RedirectWrites(TorchDispatchMode):
    """While it is active, redirects the first write to each of `parameters` into its buffer.

    The buffer then becomes the parameter's data. Before a write that cannot be redirected the parameter is
    copied to the buffer; so is a parameter without any write, at the end.
    """

    def __init__(self, parameters: Sequence[Parameter], buffers: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = {id(p): (p, buffer) for p, buffer in zip(parameters, buffers)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out_of_place = _OUT_OF_PLACE.get(func)
        if out_of_place is not None and id(args[0]) in self._buffers:
            parameter, buffer = self._buffers.pop(id(args[0]))
            out_of_place(parameter.data, *args[1:], out=buffer, **kwargs)
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
    """Whether `step` is known to write to the parameters in place, as all optimizers of torch.optim do."""
    optimizer = getattr(step, "__self__", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    )
    only_plait_hooks = all(getattr(hook, "__module__", "").startswith("plait.") for hook in hooks)
    return only_plait_hooks and type(optimizer).step.__module__.startswith("torch.optim.")


def _memory_like(masters: Sequence[Parameter]) -> list[Tensor]:
    """New memory for each of `masters`; those in one storage stay in one, which cuDNN needs for RNNs."""
    together: dict[int, list[Parameter]] = {}
    for master in masters:
        together.setdefault(master.untyped_storage().data_ptr(), []).append(master)
    storages: dict[int, Tensor] = {}
    for address, sharing in together.items():
        if len(sharing) > 1 and len({master.dtype for master in sharing}) == 1:
            count = sharing[0].untyped_storage().nbytes() // sharing[0].element_size()
            storages[address] = sharing[0].new_empty(count)
    buffers = []
    for master in masters:
        storage = storages.get(master.untyped_storage().data_ptr())
        shape = master.size(), master.stride(), master.storage_offset()
        buffers.append(torch.empty_like(master) if storage is None else storage.as_strided(*shape))
    return buffers


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _find_slots(module: nn.Module, masters: Sequence[Parameter]) -> Iterator[_Slot]:
    """Every slot that holds one of `masters`; a tied one has several."""
    index = {id(master): i for i, master in enumerate(masters)}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if id(parameter) in index:
                yield _Slot(owner, name, index[id(parameter)])
    for holder, key, tensor in tensor_slots(dict(module.named_modules())):
        if id(tensor) not in index:
            continue
        if isinstance(holder, tuple):
            raise JobError(
                f"model: a parameter of shape {tuple(tensor.shape)} is also kept in a tuple, which schedules "
                f"with several versions of the weights (stash, 2bw) do not support; keep it in a list, or "
                f"use schedule flush"
            )
        yield _Slot(holder, key, index[id(tensor)])
