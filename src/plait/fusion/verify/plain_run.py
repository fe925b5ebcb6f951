"""Runs one trial's plain model with the random numbers that it draws in an array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from plait.fusion.dispatch.random import Calls, Streams
from plait.fusion.trials.single_trial import SingleTrialMode, seeded_for


@contextmanager
def drawing_as(model: nn.Module, seed: int, rng_step: int, unfused: Mapping[str, str]) -> Iterator[None]:
    """Context in which `model` draws the random numbers of a fused trial, from `rng_step` on."""
    plain = PlainRun(model, seed, rng_step, unfused)
    try:
        with plain.forwards():
            yield
    finally:
        plain.close()


class PlainRun:
    """One trial's plain model with the trial's stream; unfused modules use seeded generators."""

    def __init__(self, model: nn.Module, seed: int, rng_step: int, unfused: Mapping[str, str]) -> None:
        self._model = model
        self._seed = seed
        self._rng_step = rng_step
        self._streams: Streams | None = None
        self._handles: list[Any] = []
        for name in unfused:
            part = model.get_submodule(name)
            if not isinstance(part, torch.jit.ScriptModule):
                self._handles.append(part.register_forward_pre_hook(self._enter))
                self._handles.append(part.register_forward_hook(self._leave))
        self._open: list[Any] = []

    def close(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Context in which each forward of the model, and what follows it, runs as this trial's next step."""
        current = ExitStack()

        def begin(*_: object) -> None:
            current.close()
            current.enter_context(self.forward())

        # Before the hooks of unfused modules, as the model itself may be one.
        with current, self._model.register_forward_pre_hook(begin, prepend=True):
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which one forward and its loss run as this trial."""
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        seeds, rng_steps = (torch.tensor([number], device=device) for number in (self._seed, self._rng_step))
        calls, training = Calls(), self._model.training
        self._streams = Streams(seeds, rng_steps, calls.begin(training, True, 0))
        mode = SingleTrialMode(self._streams)

        def begin_loss(*_: object) -> None:
            # The streams of the next call of the fused module, from which a loss draws.
            calls.begin_step(follows_forward=True)
            start = calls.begin(training, False, 0)
            mode.trials.streams = self._streams = Streams(seeds, rng_steps + int(training), start)

        try:
            with self._model.register_forward_hook(begin_loss), mode:
                yield
        finally:
            while self._open:
                self._open.pop().__exit__(None, None, None)
        if self._model.training:
            self._rng_step += 1

    def _enter(self, *_: object) -> None:
        assert self._streams is not None
        context = seeded_for(self._streams)
        context.__enter__()
        self._open.append(context)

    def _leave(self, *_: object) -> None:
        self._open.pop().__exit__(None, None, None)
