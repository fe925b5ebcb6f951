"""Models larger than one device: built without memory, then only the worker's own tensors are materialized.

The model's factory is run twice. The first run creates fake tensors and records which operation creates which
parameter or buffer. The second materializes those of the worker's stages, and frees each of the others as
soon as it is created. Random numbers are drawn for all of them, so a worker's tensors are bitwise equal to
those of the whole model. A worker never holds more than its own tensors and one other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plait.core.errors import InputError
from plait.verification import unchanged_random_numbers

# Tensors with up to this many elements are always real: some are read while the model is built.
_SMALL = 256


class NotInPiecesError(InputError):
    """The model cannot be built piece by piece; the message says why."""


class LocalTensors:
    """A model of fake tensors, some of which can be materialized with the values that its factory gives them.

    `make` runs the factory, with the same random numbers each time; its result is not used otherwise.
    """

    def __init__(
        self, make: Callable[[], nn.Module], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self._make = make
        self._dtype = dtype
        self._device = device
        building = _Building(lambda number: True, draws=False)
        with unchanged_random_numbers(), building.filling():
            model = _made(make)
        self._operations = building.operations
        named = dict(_named_tensors(model))
        self._makers = {name: building.maker_of(tensor) for name, tensor in named.items()}
        _check_attributes(model)
        self.model = _emptied(model, dtype, device)

    def weight_bytes(self) -> int:
        """The size of all parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def fill(self, names: Collection[str]) -> None:
        """Materialize the tensors `names` of `model` with the values that the factory gives them."""
        needed = {self._makers[name] for name in names}
        others = {maker for name, maker in self._makers.items() if name not in names} - needed
        with _Building(others.__contains__, draws=True, expected=self._operations).filling():
            made = dict(_named_tensors(_made(self._make)))
        for name, tensor in _named_tensors(self.model):
            if name not in names or tensor.untyped_storage().nbytes() or not tensor.numel():
                continue
            value = made[name].detach()
            if isinstance(value, FakeTensor):
                raise NotInPiecesError(f"model: {name!r} is computed from a tensor that another worker holds")
            tensor.data = value.to(self._device, self._dtype if value.is_floating_point() else None)


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    except NotInPiecesError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as failure:
        raise NotInPiecesError(f"model: it cannot be built with fake tensors ({failure})") from failure


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, including non-persistent ones; a tied one under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class _Building(TorchDispatchMode):
    """Replaces the result of an operation by a fake tensor if `is_without(number of the operation)`.

    Results computed from fake tensors are fake too. Fake tensors report the device of real ones, so the
    factory treats both alike. With `draws`, random numbers are still drawn for fake tensors. `expected` are
    the operations of an earlier run, which must be repeated.
    """

    def __init__(
        self, is_without: Callable[[int], bool], draws: bool, expected: list[str] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self._is_without = is_without
        self._draws = draws
        self._expected = expected
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._made_by: dict[int, tuple[Any, int]] = {}
        self._is_apart = False

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Active while the factory runs. Truncated normals, which resample by value, are drawn separately."""
        plain = torch.nn.init._no_grad_trunc_normal_

        def drawn_apart(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(tensor, FakeTensor) and not self._draws:
                return tensor
            self._is_apart = True
            try:
                plain(_scratch(tensor) if isinstance(tensor, FakeTensor) else tensor, *args, **kwargs)
            finally:
                self._is_apart = False
            return tensor

        torch.nn.init._no_grad_trunc_normal_ = drawn_apart
        try:
            with self:
                yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = plain

    def maker_of(self, tensor: Tensor) -> int:
        """The number of the operation that created the storage of `tensor`."""
        made = self._made_by.get(tensor.untyped_storage()._cdata)
        if made is None and tensor.numel() <= _SMALL:
            return -1
        if made is None:
            raise NotInPiecesError("model: it holds a tensor that was created before its factory was called")
        return made[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_apart:
            return func(*args, **kwargs)
        has_memory = not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs)))
        outcome = func(*args, **kwargs) if has_memory else self._without_memory(func, args, kwargs)
        made = [leaf for leaf in pytree.tree_leaves(outcome) if isinstance(leaf, Tensor)]
        # The result of torch.tensor arrives here first through lift_fresh, as an alias.
        is_new = func is torch.ops.aten.lift_fresh.default
        if not is_new and any(result.alias_info is not None for result in func._schema.returns):
            made = []
        number = self._count(func, made)
        if has_memory and made and self._is_without(number):
            outcome = pytree.tree_map_only(Tensor, self._emptied, outcome)
            made = [leaf for leaf in pytree.tree_leaves(outcome) if isinstance(leaf, Tensor)]
        for tensor in made:
            storage = tensor.untyped_storage()
            # Kept so that its address is not reused; storages of fake tensors cost nothing.
            kept = storage if isinstance(tensor, FakeTensor) else None
            self._made_by[storage._cdata] = (kept, number)
        return outcome

    def _count(self, func: Any, made: list[Tensor]) -> int:
        """The number of an operation, counting those that create large tensors or draw random numbers."""
        number = len(self.operations)
        is_large = any(tensor.numel() > _SMALL for tensor in made)
        if not is_large and torch.Tag.nondeterministic_seeded not in func.tags:
            return number
        self.operations.append(str(func))
        if self._expected is not None and self._expected[number : number + 1] != [str(func)]:
            raise NotInPiecesError(f"model: its factory does not repeat the same operations ({func})")
        return number

    def _emptied(self, tensor: Tensor) -> Tensor:
        if tensor.numel() <= _SMALL:
            return tensor
        with self._fakes:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    def _without_memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [
            value
            for argument, value in zip(func._schema.arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(isinstance(value, Tensor) and not isinstance(value, FakeTensor) for value in written):
            raise NotInPiecesError(f"model: {func} writes what another worker holds into a tensor held here")
        if self._draws and torch.Tag.nondeterministic_seeded in func.tags:
            # Draw as many random numbers as the tensor needs, then drop them.
            func(*pytree.tree_map_only(FakeTensor, _scratch, args), **kwargs)
        with self._fakes:
            return func(*args, **kwargs)


def _scratch(tensor: FakeTensor) -> Tensor:
    with unset_fake_temporarily():
        return torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def _check_attributes(model: nn.Module) -> None:
    """Raise for tensors that are neither parameters nor buffers: no stage would hold them."""
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"):
                continue
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                where = f"{path}.{name}" if path else name
                raise NotInPiecesError(f"model: {where} is a tensor, but neither a parameter nor a buffer")


def _emptied(model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """`model` on `device`, its storages empty but with their sizes; tied tensors stay tied."""
    made: dict[int, Tensor] = {}

    def emptied(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
            bare.untyped_storage().resize_(0)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return made[id(tensor)]

    for part in model.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = emptied(tensor)  # type: ignore[assignment]
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]
    return model
