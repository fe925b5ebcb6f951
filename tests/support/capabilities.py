"""What this process may do beyond an ordinary user: root in a container often may not."""

from __future__ import annotations

from pathlib import Path

# Numbers of linux/capability.h.
_NUMBERS = {"setuid": 7, "sys_admin": 21}


def may(name: str) -> bool:
    """Whether this process has the capability: `setuid` to become another user, `sys_admin` to mount."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    (held,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(held >> _NUMBERS[name] & 1)
