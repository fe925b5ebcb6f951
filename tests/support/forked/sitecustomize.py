"""Python reads this as it starts, where support/commands.py says so: another process does this one's work."""

from __future__ import annotations

import os
import sys

_address = os.environ.get("PLAIT_TESTS_FORK_FROM")
_words = sys.orig_argv[1:]
if _address:
    from stand_in import end_with, stand_in
if _address and "-m" in _words:
    _at = _words.index("-m") + 1
    if _words[_at] in ("plait", "plait.launcher.fork_server"):
        end_with(stand_in(_address, _words[_at], _words[_at + 1 :]))
elif _address and _words and os.path.basename(_words[0]) == "plait":  # the command that people type
    end_with(stand_in(_address, "plait", _words[1:]))
