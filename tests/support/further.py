"""Settings that show again, in another way, what others show: they are for `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def but_further(values: Iterable[Any], *further: Any) -> list[Any]:
    """`values` for `parametrize`; those among `further` only where `make test-all` asks for them."""
    listed = list(values)
    assert all(value in listed for value in further), f"found {further}, expected some of {listed}"
    return [pytest.param(v, marks=pytest.mark.extended) if v in further else v for v in listed]
