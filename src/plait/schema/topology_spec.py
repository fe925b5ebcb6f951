"""The topology that a user asks for: a name, a file with graphs, or a function that makes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.files import read_text
from plait.core.names import did_you_mean, in_words, resolve
from plait.core.shown import shown
from plait.core.yaml_text import YamlError, load_yaml
from plait.schema.topology import (
    NATIVE,
    TOPOLOGIES,
    Hosts,
    Topology,
    TopologyError,
    check_name,
    from_graphs,
    make_topology,
)

AUTO = "auto"
DEFAULT = "default"
KEY = "parallel.topology"
NAMES = (DEFAULT, NATIVE, AUTO, *TOPOLOGIES)
MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class TopologySpec:
    """`name` as the user wrote it; where that is a file, the `graphs` in it."""

    name: str = DEFAULT
    graphs: tuple[Mapping[str, Any], ...] = ()

    @property
    def by_name(self) -> bool:
        """Whether it is one of ours, which fits any workers."""
        return self.name.partition(":")[0] in NAMES


def read_wish(text: str) -> TopologySpec:
    """What `parallel.topology` asks for; a file is read here, so that workers need not have it."""
    wish = TopologySpec(text)
    if wish.by_name:
        return wish
    if text.endswith((".json", ".yaml", ".yml")):
        return TopologySpec(text, tuple(_read(Path(text))))
    if ":" in text:
        return wish
    raise TopologyError(
        f"{KEY}: found {shown(text)}, expected {', '.join(NAMES)}, a file (.json, .yaml) or "
        f"package.module:function{did_you_mean(text, NAMES)}"
    )


def _read(path: Path) -> list[Any]:
    expected = "graphs: [{reduce: [[1, 0]]}]"
    try:
        # JSON is YAML too.
        content = load_yaml(read_text(path, expected, MOST_BYTES, TopologyError))
    except TopologyError as failure:
        raise TopologyError(f"{KEY}: {failure}") from None
    except YamlError as failure:
        line = "" if failure.line is None else f":{failure.line}"
        raise TopologyError(f"{KEY}: {path}{line}: {failure}; expected {expected}") from None
    graphs = content.get("graphs") if isinstance(content, dict) else None
    if not isinstance(graphs, list) or not graphs:
        raise TopologyError(f"{KEY}: {path} has no list of graphs; expected {expected}")
    return graphs


def check_wish(wish: TopologySpec, size: int) -> None:
    """Refuse a topology that cannot be made over `size` ranks; a function is not called."""
    kind, colon, _ = wish.name.partition(":")
    if wish.graphs:
        from_graphs(wish.graphs, size, wish.name)
    elif kind in (DEFAULT, NATIVE, AUTO):
        if colon:
            raise TopologyError(f"{KEY}: found {shown(wish.name)}; {kind} has no root to choose")
    elif wish.by_name:
        check_name(wish.name, size)


def find_topology(wish: TopologySpec, hosts: Hosts) -> Topology | None:
    """The topology wished for, over ranks on these hosts; None for the backend's own way.

    A `package.module:function` is called, by every worker, with the host of each rank and returns graphs as a
    file holds them. `auto` is not found but chosen, by measuring. The default is for workers on CPUs: on one
    host it goes through the memory that they share, which takes a half to a fifth of gloo's time.
    """
    assert wish.name != AUTO
    check_wish(wish, len(hosts))
    if wish.name == DEFAULT:
        shares = len(set(hosts)) == 1 and hasattr(os, "memfd_create")
        return make_topology("binary-tree", hosts) if shares else None
    if wish.graphs:
        return from_graphs(wish.graphs, len(hosts), wish.name)
    if wish.name == NATIVE:
        return None
    if wish.by_name:
        return make_topology(wish.name, hosts)
    return from_graphs(_called(wish.name, hosts), len(hosts), wish.name)


def _called(name: str, hosts: Hosts) -> Any:
    """What the user's function makes of `hosts`; whatever goes wrong in it is told in one sentence."""
    function = resolve(name, KEY, TopologyError)
    try:
        return function(list(hosts))
    except (Exception, SystemExit) as failure:
        raise TopologyError(
            f"{KEY}: {shown(name)} failed with {in_words(failure)}; expected a function that takes the host "
            f"of each rank and returns graphs: [{{'reduce': [[1, 0]]}}]"
        ) from failure
