"""Callbacks of a run: made from the names of a job, checked, and called for the events of its record."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from plait.callbacks.records import (
    ChangeRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    Record,
    StartRecord,
    StepRecord,
    record_of,
)
from plait.core import run_events
from plait.core.errors import JobError, PlaitError
from plait.core.events import Event
from plait.core.names import check_arguments, check_extra, did_you_mean, in_words, line_of, resolve
from plait.core.shown import shown
from plait.schema.settings import CallSettings, CommonSettings

KEY = "callbacks"
_TENSORBOARD = CallSettings("plait.callbacks.tensorboard:TensorBoard")


class Callback:
    """What a callback may have; a class with some of these methods need not derive from it."""

    def on_start(self, record: StartRecord) -> None:
        """The run begins or, with `record.step` steps done, goes on."""

    def on_step(self, record: StepRecord) -> None:
        """Steps were taken, as often as `log_every_steps` says."""

    def on_evaluate(self, record: EvaluationRecord) -> None:
        """The test split was evaluated."""

    def on_checkpoint(self, record: CheckpointRecord) -> None:
        """A checkpoint was written."""

    def on_change(self, record: ChangeRecord) -> None:
        """The run was changed while it runs, by a policy, a command or the loss of a worker."""

    def on_end(self, record: EndRecord) -> None:
        """The run has ended."""


class PackagedCallback:
    """A callback that needs a package of an extra."""

    package: ClassVar[str]

    def __init__(self) -> None:
        self.check_installed()

    @classmethod
    def check_installed(cls) -> None:
        check_extra(cls.package, f"{KEY}: {cls.__name__}", JobError)


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackError(PlaitError):
    """A callback raised an error."""


def callbacks_of(settings: CommonSettings) -> tuple[CallSettings, ...]:
    """The callbacks of a job, with the one that its key `tensorboard` stands for."""
    return (*settings.callbacks, *([_TENSORBOARD] if settings.tensorboard else []))


def check_callbacks(settings: Sequence[CallSettings]) -> None:
    """Refuse callbacks that cannot be imported, take other options, or have misspelt methods."""
    for each in settings:
        code = resolve(each.call, KEY, JobError)
        if _is_made(code):
            _check_object(code)
            continue
        if not callable(code):
            raise JobError(f"{KEY}: found {shown(code)}, {_expected()}")
        check_arguments(code, each.options, f"{KEY}.options", JobError)
        if isinstance(code, type):
            _check_methods(code)
            if issubclass(code, PackagedCallback):
                code.check_installed()


def make_callbacks(settings: Sequence[CallSettings], alone: bool = True) -> list[tuple[str, object]]:
    """The callbacks of one run or, unless it is `alone`, of one of several trials; each with its name."""
    check_callbacks(settings)
    made: list[tuple[str, object]] = []
    for each in settings:
        code = resolve(each.call, KEY, JobError)
        if _is_made(code):
            made.append((_name_of(code), code if alone else copy.deepcopy(code)))
            continue
        try:
            callback = code(**each.options)
        except PlaitError:
            raise
        except Exception as failure:  # a user's code may raise anything
            what = f"{_name_of(code)} failed with {in_words(failure)}{line_of(failure)}"
            raise JobError(f"{KEY}: {what}") from failure
        _check_object(callback)
        made.append((_name_of(callback), callback))
    return made


def _ignore(record: object) -> None:
    pass


def _name_of(code: object) -> str:
    """The name of a callback, or of its class."""
    return str(getattr(code, "__name__", type(code).__name__))


def _events_of(code: object) -> list[str]:
    return [name for name in dir(code) if name.startswith("on_")]


def _expected() -> str:
    return f"expected an object with methods such as {', '.join(METHODS[1:4])}, or a class that makes one"


def _is_made(code: object) -> bool:
    """Whether it is a callback already, rather than what makes one."""
    return not isinstance(code, type) and bool(_events_of(code))


def _check_methods(code: object) -> None:
    """Refuse an object, or a class, none of whose methods is ever called, or one of whose methods is not."""
    name, names = _name_of(code), _events_of(code)
    for each in names:
        if each not in METHODS:
            hint = did_you_mean(each, METHODS)
            raise JobError(f"{KEY}: {name} has a method {each!r}, which no event calls{hint}")
    if not names:
        raise JobError(f"{KEY}: {name} has none of the methods {', '.join(METHODS)}; {_expected()}")


def _check_object(callback: object) -> None:
    _check_methods(callback)
    for each in _events_of(callback):
        method = getattr(callback, each)
        try:
            inspect.signature(method).bind(None)
        except TypeError:
            raise JobError(
                f"{KEY}: {each} of {_name_of(callback)} cannot be called with a record; expected a method "
                f"such as def {each}(self, record)"
            ) from None
        except ValueError:  # some builtins have no signature to check against
            continue


class RunCallbacks:
    """Calls the callbacks of one run, or trial, for each event of its record.

    `start` gives the record of `on_start`, which is called before all others, after that number of steps.
    """

    def __init__(
        self, callbacks: Sequence[tuple[str, object]], folder: Path, start: Callable[[int], StartRecord]
    ) -> None:
        self._callbacks = list(callbacks)
        self._checkpoints = folder
        self._start = start
        self._has_started = False
        self._step = 0

    def handle(self, event: Event) -> None:
        """Call the method that the event is for; CallbackError if a callback fails."""
        if isinstance(event, run_events.RunStarted):
            self._begin(event.step)
        elif (recorded := record_of(event, self._checkpoints)) is not None:
            method, record = recorded
            if not self._has_started:
                self._begin(max(0, record.step - 1))
            self._step = record.step
            self._call(method, record)

    def _begin(self, step: int) -> None:
        self._has_started, self._step = True, step
        self._call("on_start", self._start(step))

    def _call(self, method: str, record: StartRecord | Record) -> None:
        for named in list(self._callbacks):
            name, callback = named
            if method == "on_end":
                self._callbacks.remove(named)
            try:
                getattr(callback, method, _ignore)(record)
            except Exception as failure:  # a user's code may raise anything
                # The others are told of the end of the run.
                self._callbacks = [each for each in self._callbacks if each is not named]
                raise CallbackError(
                    f"{KEY}: {name} failed in {method} after step {record.step}: {in_words(failure)}"
                    f"{line_of(failure)}; mend it, or leave it out, and go on with --resume"
                ) from failure

    def end(self, reason: str) -> None:
        """Call `on_end` for a run whose record ends without an event; errors in it are not reported."""
        while self._has_started and self._callbacks:
            with contextlib.suppress(CallbackError):
                self._call("on_end", EndRecord(self._step, reason))


class TrialCallbacks:
    """Calls the callbacks of the trials of a sweep, each of which has its own.

    `checkpoints` gives the folder of a trial's checkpoints, `start` the record of its `on_start`.
    """

    def __init__(
        self,
        settings: Sequence[CallSettings],
        checkpoints: Callable[[int], Path],
        start: Callable[[int], StartRecord],
    ) -> None:
        self._settings = settings
        self._checkpoints = checkpoints
        self._start = start
        self._running: dict[int, RunCallbacks] = {}
        check_callbacks(settings)

    def handle(self, event: Event) -> None:
        """Call the method that the event of a trial is for."""
        number = getattr(event, "trial", None)
        if not self._settings or number is None or record_of(event, Path()) is None:
            return
        if number not in self._running:
            made = make_callbacks(self._settings, alone=False)
            self._running[number] = RunCallbacks(
                made, self._checkpoints(number), lambda step: self._start(number)
            )
        self._running[number].handle(event)
        if isinstance(event, run_events.TrialEnded):
            self._running.pop(number, None)

    def end(self, reason: str) -> None:
        """End the callbacks of trials that have not ended."""
        for each in self._running.values():
            each.end(reason)
        self._running.clear()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings without levels, by keys such as `optimizer.lr`; options of a section are its keys."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            named |= flat(value, prefix if key == "options" else f"{prefix}{key}.")
        elif value is not None:
            named[f"{prefix}{key}"] = value
    return named
