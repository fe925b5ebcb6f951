"""Hosts as people name them: none of it can become an option or a command of the shell that reaches them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.errors import InputError
from plait.launcher.launchers.ssh import ShellLauncher
from plait.schema.hosts import Host, parse_hosts


def test_names_addresses_and_users_are_hosts():
    found = parse_hosts(["w0:2", " w1 ", "10.0.0.1:4", "user@host-3.example:007", "é"], "-H")
    assert [host.slots for host in found] == [2, 1, 4, 7, 1]
    assert found[3] == Host("user@host-3.example", 7)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("", "expected 'host' or 'host:workers'"),
        ("w0:0", "expected 'host' or 'host:workers'"),
        ("w0:-1", "expected 'host' or 'host:workers'"),
        ("w0:٣", "expected 'host' or 'host:workers'"),
        ("w0:²", "expected 'host' or 'host:workers'"),
        ("w0:" + "9" * 5000, "expected 'host' or 'host:workers'"),
        ("w0:70000", "expected at most 65,536 workers on a host"),
        ("-oProxyCommand=touch:1", "expected a host's name or address"),
        ("-F/tmp/x", "no '-' in front"),
        ("w\0:1", "expected a host's name or address"),
        ("a b:1", "expected a host's name or address"),
        ("a$(touch x):1", "expected a host's name or address"),
        ("a;b", "expected a host's name or address"),
        ("'a'", "expected a host's name or address"),
    ],
)
def test_what_is_no_host_is_refused(entry: str, words: str):
    with pytest.raises(InputError) as caught:
        parse_hosts([entry], "-H")
    assert str(caught.value).startswith("-H: found ")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_host_named_twice_is_refused():
    with pytest.raises(InputError, match="'w0' is listed twice"):
        parse_hosts(["w0:1", "w1", "w0:2"], "-H")


@pytest.mark.parametrize("shell", ["{folder}/ssh -q {{host}}", "env {folder}/run-on {{host}}"])
def test_an_interpreter_whose_path_has_spaces_is_found_on_every_host(shell: str, tmp_path: Path):
    """ssh has the host's shell take its words apart; other commands pass them on as they are."""
    stands_for = {"ssh": 'shift 2; exec sh -c "$*"', "run-on": 'shift; exec "$@"', "my python": 'echo "$@"'}
    for name, does in stands_for.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    launcher = ShellLauncher((), shell.format(folder=tmp_path))
    stream = launcher.start(Host("w0", 1), [str(tmp_path / "my python"), "-m", "plait.launcher.agent"], {})
    assert [line for output in (stream.stdout, stream.stderr) for line in output or ()] == [
        "-m plait.launcher.agent\n"
    ]
    assert stream.wait(60) == 0
