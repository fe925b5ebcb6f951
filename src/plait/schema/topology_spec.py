"""The topology in a job: a name, a file with graphs, or a function that returns graphs."""

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
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class TopologySpec:
    """The topology as `parallel.topology` has it; for a file also the `graphs` in it."""

    name: str = DEFAULT
    graphs: tuple[Mapping[str, Any], ...] = ()

    @property
    def by_name(self) -> bool:
        """Whether it is a built-in topology, which fits any number of workers."""
        return self.name.partition(":")[0] in NAMES

    @property
    def is_function(self) -> bool:
        """Whether a function of the user makes it, which is called with the hosts of the workers."""
        return not self.by_name and not self.graphs


def read_topology_spec(text: str) -> TopologySpec:
    """Parse `parallel.topology`; a file is read here, because workers may not have it."""
    spec = TopologySpec(text)
    if spec.by_name:
        return spec
    if text.endswith((".json", ".yaml", ".yml")):
        return TopologySpec(text, tuple(_read(Path(text))))
    if ":" in text:
        return spec
    raise TopologyError(
        f"{KEY}: found {shown(text)}, expected {', '.join(NAMES)}, a file (.json, .yaml) or "
        f"package.module:function{did_you_mean(text, NAMES)}"
    )


def _read(path: Path) -> list[Any]:
    expected = "graphs: [{reduce: [[1, 0]]}]"
    try:
        # JSON is YAML too.
        content = load_yaml(read_text(path, expected, MAX_BYTES, TopologyError))
    except TopologyError as failure:
        raise TopologyError(f"{KEY}: {failure}") from None
    except YamlError as failure:
        line = "" if failure.line is None else f":{failure.line}"
        raise TopologyError(f"{KEY}: {path}{line}: {failure}; expected {expected}") from None
    graphs = content.get("graphs") if isinstance(content, dict) else None
    if not isinstance(graphs, list) or not graphs:
        raise TopologyError(f"{KEY}: {path} has no list of graphs; expected {expected}")
    return graphs


def check_topology(spec: TopologySpec, size: int) -> None:
    """Raise TopologyError if the topology does not fit `size` ranks; a function is not called."""
    kind, colon, _ = spec.name.partition(":")
    if spec.graphs:
        from_graphs(spec.graphs, size, spec.name)
    elif kind in (DEFAULT, NATIVE, AUTO):
        if colon:
            raise TopologyError(f"{KEY}: found {shown(spec.name)}; {kind} has no root to choose")
    elif spec.by_name:
        check_name(spec.name, size)


def fitting(spec: TopologySpec, size: int) -> TopologySpec:
    """`spec`, or the default if it does not fit `size` ranks: its root may have left."""
    try:
        check_topology(spec, size)
    except TopologyError:
        return TopologySpec()
    return spec


def build_topology(spec: TopologySpec, hosts: Hosts) -> Topology | None:
    """The topology of `spec` over ranks on `hosts`; None for the backend's own all-reduce.

    Every worker calls a `package.module:function` with the host of each rank; it returns graphs as in a file.
    `auto` is chosen by measurement, not here. The default is for workers on CPUs: on one host it uses shared
    memory, which takes a half to a fifth of gloo's time.
    """
    assert spec.name != AUTO
    check_topology(spec, len(hosts))
    if spec.name == DEFAULT:
        shares = len(set(hosts)) == 1 and hasattr(os, "memfd_create")
        return make_topology("binary-tree", hosts) if shares else None
    if spec.graphs:
        return from_graphs(spec.graphs, len(hosts), spec.name)
    if spec.name == NATIVE:
        return None
    if spec.by_name:
        return make_topology(spec.name, hosts)
    return _call(spec.name, hosts)


def _call(name: str, hosts: Hosts) -> Topology:
    """The topology of the user's function; any exception becomes a TopologyError of one sentence."""
    function = resolve(name, KEY, TopologyError)
    try:
        return from_graphs(function(list(hosts)), len(hosts), name)
    except TopologyError:
        raise
    except (Exception, SystemExit) as failure:
        raise TopologyError(
            f"{KEY}: {shown(name)} failed with {in_words(failure)}; expected a function that takes the host "
            f"of each rank and returns graphs: [{{'reduce': [[1, 0]]}}]"
        ) from failure
