"""Importing much at once, sooner: nothing of it is garbage, which Python would look for all the while.

The server that workers are forked from imports this module first, and with it what `ORDER` names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterable

ORDER = "PLAIT_IMPORTS"


def import_all(modules: Iterable[str]) -> None:
    """Import `modules`; later collections pass over all that is there by then.

    A module that cannot be imported is left to whoever needs it, who can say why.
    """
    collects = gc.isenabled()
    # A seventh of the time that torch takes went into collections, and each later one through all of it
    # stops a step for 0.2 s.
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


# Workers need not know.
import_all(os.environ.pop(ORDER, "").split())
