"""Parameters and buffers of a model that share memory although they are not one tensor.

As after `head.weight = nn.Parameter(table.weight)`: what is written to one changes the other. Copies of a
model hold them apart, those of `copy.deepcopy`, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def overlapping(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The names of each two parameters or buffers with a common element, one of which may be written to.

    Of two frozen parameters none is.
    """
    together: defaultdict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.numel():
            together[tensor.untyped_storage()._cdata].append((name, tensor))
    for held in together.values():
        for (one, a), (other, b) in combinations(held, 2):
            if not (_is_frozen(a) and _is_frozen(b)) and _overlap(a, b):
                yield one, other


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one storage have an element in common."""
    (first, end), (start, last) = _span(a), _span(b)
    if first >= last or start >= end:
        return False
    # The first element of one is within the other, which has no gaps.
    if (start >= first and end - first == a.numel()) or (first >= start and last - start == b.numel()):
        return True
    # As of two columns of a matrix, whose elements lie between one another.
    elements = torch.arange(max(end, last))
    places = (elements.as_strided(x.shape, x.stride(), x.storage_offset()).flatten() for x in (a, b))
    return bool(torch.isin(*places).any())


def _span(x: Tensor) -> tuple[int, int]:
    """Where in its storage the elements of x begin and end."""
    first = int(x.storage_offset())
    return first, first + 1 + sum(int(stride) * (size - 1) for stride, size in zip(x.stride(), x.shape))
