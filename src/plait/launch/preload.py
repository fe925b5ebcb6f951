"""Importing many modules faster: nothing of them is garbage, so no collection looks for any meanwhile."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterable


def import_all(modules: Iterable[str]) -> None:
    """Import `modules`; later collections pass over all that is there by then.

    A module that cannot be imported is left to the code that needs it, whose error says why.
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


def remove_empty_cache() -> None:
    """Remove the folder for compiled code that torch makes in the temporary folder when it is imported.

    Where code was compiled it stays: it is torch's cache for later runs.
    """
    made = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    if made is not None:
        with contextlib.suppress(OSError):
            os.rmdir(made.default_cache_dir())
