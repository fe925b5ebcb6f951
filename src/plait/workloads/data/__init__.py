"""Data sets: a kind and its options in, a map-style set of (input, target) pairs out.

Every set of ours has `__len__` and `__getitem__(index)`. A set that gives a whole batch at once also has
`collated_batch(indices) -> (inputs, targets)`; it draws nothing at random. (Torch's `__getitems__` gives a
list of samples.) A set that augments has only `__getitem__`, and draws only from torch's global generator, so
that seeding it per sample makes samples reproducible. A user's set may be a stream, read in its own order.
"""

from plait.workloads.data.kinds import KINDS, build, check
from plait.workloads.data.stored import MapDataset, Split, is_stream

__all__ = ["KINDS", "MapDataset", "Split", "build", "check", "is_stream"]
