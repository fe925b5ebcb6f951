"""The command line: verbs that parse options, call the library and print the result.

Exit status: 0 success, 1 a failed run, 2 bad input with one clear message, 130 stopped before its end.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import typer

from plait.cli.bench import BenchCommand, bench
from plait.cli.check import check
from plait.cli.demo import demo
from plait.cli.manifest import manifest
from plait.cli.new import new
from plait.cli.os_errors import os_errors_as_messages
from plait.cli.planning import plan, profile
from plait.cli.report import report
from plait.cli.runs import evaluate, resize, status, stop
from plait.cli.script import OPTIONS_END, run
from plait.cli.sweep import sweep
from plait.cli.train import train
from plait.core.errors import PlaitError
from plait.core.files import expand_path
from plait.core.shown import printable
from plait.launcher.fork_server import remove_empty_cache

app = typer.Typer(
    name="plait",
    help="Train PyTorch models on whatever devices there are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def with_paths(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with `~` and variables expanded in its path arguments."""
    # Typer evaluates annotations that are text four times, which took most of the time to parse a command.
    verb.__annotations__ = get_type_hints(verb, include_extras=True)

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        verb(**{name: _expanded(value) for name, value in given.items()})

    return run


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    return Path(expand_path(str(value))) if isinstance(value, Path) else value


app.command(context_settings=OPTIONS_END)(with_paths(run))
VERBS = (
    demo, new, check, profile, plan, train, sweep, evaluate, status, stop, resize, report, manifest, bench,
)  # fmt: skip
for verb in VERBS:
    app.command(cls=BenchCommand if verb is bench else None)(with_paths(verb))


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print Plait's version and end."),
) -> None:
    """Train PyTorch models on whatever devices there are."""
    if version:
        from plait import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the verb of the arguments; wrong input and failed runs end with one message."""
    _open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        with os_errors_as_messages():
            app()
    except PlaitError as failure:
        if trace := getattr(failure, "traceback", ""):
            print(trace.rstrip(), file=sys.stderr)
        _end(str(failure), failure.exit_status)
    except BrokenPipeError:
        # The reader of our output has closed it; nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        remove_empty_cache()


def _open_closed_streams() -> None:
    """Open missing standard streams on /dev/null, before another file gets their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _end(message: str, status: int) -> NoReturn:
    print(printable(f"plait: {message}"), file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": message}))
    sys.exit(status)
