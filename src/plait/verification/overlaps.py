"""Parameters and buffers of a model that share memory although they are not one tensor.

As after `head.weight = nn.Parameter(table.weight)`: what is written to one changes the other. Stages, fused
trials and most copies hold them apart; `copy.deepcopy` does so for parameters, but not for buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class _Held(NamedTuple):
    """The bytes of its storage at which the elements of a tensor begin and end, and the tensor."""

    first: int
    end: int
    name: str
    tensor: Tensor


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """The names of each two tensors with a common element, one of which may be written to.

    Of two frozen parameters none is.
    """
    together: defaultdict[int, list[_Held]] = defaultdict(list)
    for name, tensor in named:
        if type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.numel():
            together[tensor.untyped_storage()._cdata].append(_Held(*_span(tensor), name, tensor))
    for held in together.values():
        held.sort(key=attrgetter("first"))
        for number, one in enumerate(held, 1):
            for other in held[number:]:
                if other.first >= one.end:
                    break
                if not (_is_frozen(one.tensor) and _is_frozen(other.tensor)) and _overlap(one, other):
                    yield one.name, other.name


def copies(parameters: Sequence[Tensor]) -> list[nn.Parameter]:
    """Copies of parameters, with the same strides, that share memory where these do."""
    made = [nn.Parameter(each.detach().clone(), each.requires_grad) for each in parameters]
    pairs = overlapping((str(number), each) for number, each in enumerate(parameters))
    storages: dict[int, torch.UntypedStorage] = {}
    for number in {int(number) for pair in pairs for number in pair}:
        source, storage = parameters[number], parameters[number].untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=source.dtype, device=source.device)
        copy.set_(storages[storage._cdata], source.storage_offset(), source.shape, source.stride())
        made[number].data = copy
    return made


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _overlap(a: _Held, b: _Held) -> bool:
    """Whether tensors of one storage have an element in common, where `b` begins between those of `a`."""
    one, other = a.tensor, b.tensor
    has_gaps = 0 in one.stride() or one.nbytes < a.end - a.first
    if not has_gaps or one.dtype != other.dtype:
        return True
    # As of two columns of a matrix, whose elements lie between one another.
    elements = torch.arange(max(a.end, b.end) // one.element_size())
    places = (elements.as_strided(x.shape, x.stride(), x.storage_offset()).flatten() for x in (one, other))
    return bool(torch.isin(*places).any())


def _span(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage at which the elements of x begin and end."""
    first = int(x.storage_offset())
    last = first + sum(int(stride) * (size - 1) for stride, size in zip(x.stride(), x.shape))
    return first * x.element_size(), (last + 1) * x.element_size()
