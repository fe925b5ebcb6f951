"""Importing much at once: all that is there is imported, and collections go on as before."""

from __future__ import annotations

import gc
import sys

import pytest

from plait.launcher.fork_server import import_all


@pytest.mark.parametrize("collects", [True, False])
def test_modules_are_imported_and_garbage_is_collected_afterwards_where_it_was_before(
    collects: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    before, kept = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if collects else gc.disable)()
        import_all(["no.such.module", "wave"])
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert "wave" in sys.modules
    assert gc.get_freeze_count() > kept
