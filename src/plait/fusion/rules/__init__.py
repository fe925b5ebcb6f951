"""Rules: implementations of torch functions for all trials at once.

Importing this package fills the table in `plait.fusion.dispatch.registry`.
"""

import plait.fusion.dispatch.call  # noqa: F401  (computes calls by the table)
from plait.fusion.rules import (  # noqa: F401
    attention,
    convolution,
    dense,
    dropout,
    elementwise,
    hooks,
    losses,
    normalisation,
    pooling,
    random_numbers,
    recurrent,
    reductions,
    shapes,
)
