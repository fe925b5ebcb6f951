"""Runs one trial's plain model with the random numbers that it draws in an array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.dispatch.random import Streams
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
        contexts: list[Any] = []

        def begin(*_: object) -> None:
            end()
            contexts.append(self.forward())
            contexts[-1].__enter__()

        def end() -> None:
            while contexts:
                contexts.pop().__exit__(None, None, None)

        # Before the hooks of unfused modules, as the model itself may be one.
        handle = self._model.register_forward_pre_hook(begin, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            end()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context in which one forward and its loss run as this trial."""
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        seeds, rng_steps = (torch.tensor([number], device=device) for number in (self._seed, self._rng_step))
        self._streams = Streams(seeds, rng_steps)
        mode = SingleTrialMode(self._streams)
        handle = self._model.register_forward_hook(lambda *_: self._begin_loss(mode, seeds, rng_steps))
        try:
            with mode:
                yield
        finally:
            handle.remove()
            while self._open:
                self._open.pop().__exit__(None, None, None)
        if self._model.training:
            self._rng_step += 1

    def _begin_loss(self, mode: SingleTrialMode, seeds: Tensor, rng_steps: Tensor) -> None:
        """Start the streams of the next call of the fused module, from which a loss draws."""
        mode.trials.streams = self._streams = Streams(seeds, rng_steps + int(self._model.training))

    def _enter(self, *_: object) -> None:
        assert self._streams is not None
        context = seeded_for(self._streams)
        context.__enter__()
        self._open.append(context)

    def _leave(self, *_: object) -> None:
        self._open.pop().__exit__(None, None, None)
