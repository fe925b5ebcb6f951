"""Data sets: a kind and its options in, a map-style set of (input, target) pairs out.

Every set has `__len__` and `__getitem__(index)`. A set that gives a whole batch at once also has
`__getitems__(indices) -> (inputs, targets)`; it draws nothing at random. A set that augments has only
`__getitem__`, and draws from torch's global generator alone: who seeds that per sample fixes the sample.
"""

from plait.workloads.data.kinds import KINDS, build, check
from plait.workloads.data.stored import MapDataset, Split

__all__ = ["KINDS", "MapDataset", "Split", "build", "check"]
