"""Models by the dozen, in two stages and as three fused trials: what they compute alone, or refused.

    python benchmarks/model_zoo.py [--only bert --only vit] [--seconds 180] [--write docs/models.md]
    python benchmarks/model_zoo.py --runs [--write docs/models.md]

Models of the transformers library from tiny configurations, all other settings at their defaults, image
models in the manner of torchvision, models as people write them, and models written to be trained wrong. Each
is trained for three steps of two microbatches and evaluated, in float64: cut in two (flush, stage after stage
in one process), and fused, three trials with weights and batches of their own. Both are compared with the
plain model: right (all within 1e-9 of the largest value), refused (with what sentence), WRONG, or crash. Exit
status 1 when there is any of the last two. Every model has a process of its own, with a deadline.

With `--runs`, a few of them are launched: as two workers, and as a sweep of three trials.

Fused trials draw random numbers from streams of their own; the plain model draws from the same streams.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError, PlaitError
from plait.data.call_model import as_arguments, evaluation_mode
from plait.fusion import FusedModule, FusedOptimizer, FusionError, fuse
from plait.fusion.dispatch.random import Calls, Streams
from plait.fusion.trials.single_trial import SingleTrialMode, seeded_for
from plait.pipeline.verify.in_process import Choices, StagedModel
from plait.pipeline.verify.verify_stages import Example, VerifiedStages, prepare_stages
from plait.profiler.trace import trace
from plait.verification import same_random_numbers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import zoo_runs
from support.hard_models import HARD
from zoo_models.everyday_models import EVERYDAY
from zoo_models.transformers_models import ARCHITECTURES, Batch, inputs_of, maker
from zoo_models.vision_models import VISION

TOLERANCE = 1e-9
STEPS = 3
TRIALS = 3
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


@dataclass(frozen=True)
class Case:
    """A model, two batches of inputs, and the layer in front of which it is cut (the middle by default)."""

    family: str
    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], Sequence[Batch]]
    place: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a model: right, refused, WRONG or crash; the sentence says why, or what is not usual."""

    word: str
    sentence: str
    seconds: float = 0.0


def cases() -> list[Case]:
    found = []
    if importlib.util.find_spec("transformers") is not None:
        for kind, (_, _, inputs) in ARCHITECTURES.items():
            batches: Any = lambda inputs=inputs: inputs_of(inputs)  # noqa: E731
            found.append(Case("transformers", kind, maker(kind), batches))
    found += [Case("image", name, make, batches) for name, (make, batches) in VISION.items()]
    found += [Case("everyday", name, make, batches) for name, (make, batches) in EVERYDAY.items()]
    found += [Case("hard", name, make, batches, place) for name, (make, batches, place) in HARD.items()]
    return found


def cases_by_name() -> dict[str, Case]:
    """The cases by family and name, such as `image googlenet`."""
    return {f"{case.family} {case.name}": case for case in cases()}


def loss_of(output: Any, target: Any = None) -> Tensor:
    """A loss of whatever a model returns: of its logits, or of all its tensors."""
    if isinstance(output, dict) and "logits" in output:
        output = output["logits"]
    tensors = [t for t in leaves_of(output) if isinstance(t, Tensor) and t.is_floating_point()]
    losses = [((t.double() - 0.3) ** 2).mean() for t in tensors]
    return torch.stack(losses).sum()


def make_model(case: Case, seed: int) -> nn.Module:
    """The model in float64; made anew, as not every model can be copied."""
    torch.manual_seed(seed)
    return case.make().double()


def leaves_of(output: Any) -> list[Any]:
    """What is in the structure that a model returns, in objects of its own classes too."""
    leaves = pytree.tree_leaves(output)
    return [
        leaf for one in leaves for leaf in (leaves_of(vars(one)) if dataclasses.is_dataclass(one) else [one])
    ]


def run(model: nn.Module, batch: Batch) -> Any:
    arguments = as_arguments(batch)
    return model(**arguments) if isinstance(arguments, dict) else model(*arguments)


# In two stages.


def stages_verdict(case: Case) -> Verdict:
    """Whether the model in two stages under flush is the model alone."""
    model, plain = make_model(case, 0), make_model(case, 0)
    batches = [as_double(batch) for batch in case.batches()]
    try:
        checked = prepare(case, model, batches)
        fresh = lambda: make_model(case, 0)  # noqa: E731
        staged = StagedModel(checked.traced, checked.stages, loss_of, Choices(), fresh)
        wrong = compare_stages(plain, staged, batches)
    except InputError as failure:
        return Verdict("refused", str(failure))
    return Verdict("WRONG", wrong) if wrong else Verdict("right", "; ".join(checked.notes))


def prepare(case: Case, model: nn.Module, batches: Sequence[Batch]) -> VerifiedStages:
    """The model in two stages, verified as a run would be."""
    first, second = batches
    traced = trace(model, first, others=[second], evaluation=False)
    ids = [layer.id for layer in traced.layers]
    at = ids.index(case.place) if case.place in ids else len(ids) // 2
    return prepare_stages(
        traced,
        (ids[:at], ids[at:]),
        lambda whole: trace(model, first, others=[second], whole=whole),
        Example([(first, None), (second, None)], loss_of, fresh=lambda: make_model(case, 0)),
    )


def compare_stages(plain: nn.Module, staged: StagedModel, batches: Sequence[Batch]) -> str:
    """Train and evaluate both; what is wrong with the stages, if anything."""
    for step in range(STEPS):
        plain.zero_grad()
        staged.drop_gradients()
        for place, batch in enumerate(batches):
            with same_random_numbers(10 * step + place):
                output = run(plain, batch)
                loss_of(output).backward()
            with same_random_numbers(10 * step + place):
                found, _ = staged.step(batch, None)
            if (apart := distance(output, found)) > TOLERANCE:
                return f"the output of step {step} is off by {apart:.2g}"
        grads = staged.gradients()
        for name, parameter in plain.named_parameters():
            if (grads.get(name) is None) != (parameter.grad is None):
                return f"the gradient of {name} is {'none' if grads.get(name) is None else 'not none'}"
            if distance(parameter.grad, grads.get(name)) > TOLERANCE:
                return f"the gradient of {name} at step {step} is wrong"
        update(plain, staged)
    for batch in batches:
        with same_random_numbers(7), torch.no_grad(), evaluation_mode(plain):
            output = run(plain, batch)
        with same_random_numbers(7):
            found = staged.evaluate(batch)
        if distance(output, found) > TOLERANCE:
            return "an evaluation is off"
    held = {name: buffer for _, name, buffer in staged.buffers()}
    for name, buffer in plain.named_buffers():
        if name in held and distance(buffer, held[name]) > TOLERANCE:
            return f"buffer {name} is wrong after {STEPS} steps"
    return ""


def update(plain: nn.Module, staged: StagedModel, rate: float = 0.01) -> None:
    """One step of gradient descent of both; what several stages hold gets the sum of their gradients."""
    grads = staged.gradients()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
        for stage in staged.stages:
            seen: set[int] = set()
            for name, parameter in stage.module.named_parameters(remove_duplicate=False):
                grad = grads[stage.first_names[name]]
                if grad is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameter.sub_(grad, alpha=rate)


# As fused trials.


def fused_verdict(case: Case) -> Verdict:
    """Whether three fused trials, each with weights and batches of its own, are the same trials alone."""
    models = [make_model(case, seed) for seed in range(TRIALS)]
    batches = [[as_double(batch) for batch in case.batches()] for _ in range(TRIALS)]
    try:
        fused = fuse(models, range(TRIALS), verify=batches[0])
        fused.draws_before = 0  # as alone, each call by itself
        alone = [Alone(make_model(case, seed), seed, list(fused.unfused)) for seed in range(TRIALS)]
        wrong = compare_trials(alone, fused, batches)
    except FusionError as failure:
        return Verdict("refused", str(failure))
    if wrong:
        return Verdict("WRONG", wrong)
    parts = ", ".join(part or "the whole model" for part in fused.unfused)
    return Verdict("right", f"trial by trial: {parts}" if parts else "")


class Alone:
    """One trial's plain model and torch's optimizer; it draws from the stream that the fused trial has."""

    def __init__(self, model: nn.Module, seed: int, unfused: Sequence[str]) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
        self._seed, self._rng_step = seed, 0
        self._streams = Streams(torch.tensor([seed]), torch.tensor([0]))
        self._contexts: list[Any] = []
        for name in unfused:  # modules that run trial by trial draw from generators of their own
            part = self.model.get_submodule(name)
            part.register_forward_pre_hook(lambda *_: self._begin())
            part.register_forward_hook(lambda *_: self._end())

    def run(self, batch: Batch) -> Any:
        start = Calls().begin(self.model.training, True, 0)
        self._streams = Streams(torch.tensor([self._seed]), torch.tensor([self._rng_step]), start)
        self._rng_step += self.model.training
        with SingleTrialMode(self._streams):
            return run(self.model, batch)

    def _begin(self) -> None:
        self._contexts.append(seeded_for(self._streams))
        self._contexts[-1].__enter__()

    def _end(self) -> None:
        self._contexts.pop().__exit__(None, None, None)


def compare_trials(alone: Sequence[Alone], fused: FusedModule, batches: Sequence[Sequence[Batch]]) -> str:
    """Train and evaluate both; what is wrong with the fused trials, if anything. `batches` are by trial."""
    together = FusedOptimizer(fused, "sgd", **SGD)
    for step in range(STEPS):
        together.zero_grad()
        for one in alone:
            one.optimizer.zero_grad()
        for own in zip(*batches):
            found = run_fused(fused, own)
            torch.stack([loss_of(each) for each in found]).sum().backward()
            for trial, one in enumerate(alone):
                output = one.run(own[trial])
                loss_of(output).backward()
                if (apart := distance(output, found[trial])) > TOLERANCE:
                    return f"the output of trial {trial} at step {step} is off by {apart:.2g}"
        together.step()
        for one in alone:
            one.optimizer.step()
    for trial, model in enumerate(fused.split()):
        expected = alone[trial].model.state_dict()
        if model.state_dict().keys() != expected.keys():
            return (
                f"trial {trial} has other weights or buffers: {model.state_dict().keys() ^ expected.keys()}"
            )
        for name, value in model.state_dict().items():
            if (apart := distance(expected[name], value)) > TOLERANCE:
                return f"{name} of trial {trial} is off by {apart:.2g} after {STEPS} steps"
    fused.eval()
    for own in zip(*batches):
        with torch.no_grad():
            found = run_fused(fused, own)
            for trial, one in enumerate(alone):
                one.model.eval()
                if distance(one.run(own[trial]), found[trial]) > TOLERANCE:
                    return f"an evaluation of trial {trial} is off"
    return ""


def run_fused(fused: FusedModule, own: Sequence[Batch]) -> list[Any]:
    """What each trial returns for its own batch."""
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), own[0], *own[1:])
    output = run(fused, stacked)
    return [pytree.tree_map_only(Tensor, lambda x: x[trial], output) for trial in range(len(own))]  # noqa: B023


# Comparing.


def distance(expected: Any, found: Any) -> float:
    """How far apart the tensors of two structures are, relative to the largest, which counts 1 at least."""
    ours, theirs = _tensors(expected), _tensors(found)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    return max((_apart(one, other) for one, other in zip(ours, theirs)), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    finite = a.isfinite() & b.isfinite()
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    return float((a[finite] - b[finite]).abs().max()) / max(1.0, float(a[finite].abs().max()))


def _tensors(tree: Any) -> list[Tensor]:
    leaves = leaves_of(tree)
    return [torch.as_tensor(leaf).detach() for leaf in leaves if isinstance(leaf, (Tensor, int, float))]


def as_double(batch: Batch) -> Any:
    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(convert, batch)


# The table.

VERDICTS: dict[str, Callable[[Case], Verdict]] = {"2 stages": stages_verdict, "3 fused trials": fused_verdict}


def judge(case: Case, verdict: Callable[[Case], Verdict], seconds: float) -> Verdict:
    """The verdict on a case from a process of its own; whatever else ends that process is a crash."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_judge, args=(case, verdict, theirs))
    started = time.perf_counter()
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            word, sentence = ours.recv()
        else:
            word, sentence = "crash", f"not done after {seconds:g} s"
    except EOFError:
        process.join()
        word, sentence = "crash", f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Verdict(word, sentence, time.perf_counter() - started)


def _judge(case: Case, verdict: Callable[[Case], Verdict], answer: Connection) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        found = verdict(case)
    except Exception as failure:  # anything but a refusal in words
        found = Verdict("crash", f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}")
    answer.send((found.word, found.sentence))


FAMILIES = {
    "transformers": "transformers, tiny configurations",
    "image": "image models",
    "everyday": "as people write them",
    "hard": "written to be trained wrong",
}


@dataclass(frozen=True)
class Row:
    """A line of the table: a model, what became of it, and the sentences that belong to it."""

    family: str
    name: str
    words: tuple[str, ...]
    sentence: str


def row_of(case: Case, found: Mapping[str, Verdict]) -> Row:
    words = tuple(each.word for each in found.values())
    return Row(case.family, case.name, words, _sentences(found))


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown: a column for each verdict, and their sentences."""
    lines = [f"| model | {' | '.join(VERDICTS)} | in words |", f"| --- |{' --- |' * len(VERDICTS)} --- |"]
    for family, title in FAMILIES.items():
        own = [row for row in rows if row.family == family]
        lines += [f"| **{title}** |{' |' * len(VERDICTS)} |"] if own else []
        lines += [f"| {row.name} | {' | '.join(row.words)} | {row.sentence} |" for row in own]
    return "\n".join(lines)


def read_table(text: str) -> list[Row]:
    """The rows of a table that was written before."""
    titles = {f"**{title}**": family for family, title in FAMILIES.items()}
    found, family = [], ""
    for line in text.splitlines():
        name, *words = [cell.strip() for cell in line.strip("|").split(" |")][: 1 + len(VERDICTS)]
        family = titles.get(name, family)
        if family and name not in titles and len(words) == len(VERDICTS):
            sentence = line.split("|", 2 + len(VERDICTS))[-1].rpartition("|")[0].strip()
            found.append(Row(family, name, tuple(words), sentence))
    return found


def merge(before: Sequence[Row], now: Sequence[Row]) -> list[Row]:
    """The rows of now, and those of before for models that were not asked for; in the cases' order."""
    every = {(row.family, row.name): row for row in (*before, *now)}
    return [every[key] for case in cases() if (key := (case.family, case.name)) in every]


def summary(rows: Sequence[Row]) -> str:
    """How many are right, refused, wrong, by family."""
    lines = []
    for family, title in FAMILIES.items():
        own = [row for row in rows if row.family == family]
        for number, name in enumerate(VERDICTS if own else ()):
            counts = Counter(row.words[number] for row in own)
            words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
            lines.append(f"- {title}, {name}: {words}, of {len(own)}")
    return "\n".join(lines)


def _sentences(found: Mapping[str, Verdict]) -> str:
    """The sentences without the folders of this machine."""
    given = {name: re.sub(r"/[^\s`]+/", "", " ".join(each.sentence.split())) for name, each in found.items()}
    return "; ".join(f"{name}: {text}" for name, text in given.items() if text).replace("|", "\\|")


# Real runs.

RUNS: dict[str, Callable[[str, Path], float]] = {
    "2 workers, flush": lambda name, folder: zoo_runs.launched_in_stages(name, folder, "flush"),
    "2 workers, stash": lambda name, folder: zoo_runs.launched_in_stages(name, folder, "stash"),
    "sweep of 3": zoo_runs.launched_sweep,
}


def runs_table() -> str:
    """How far launched runs end from one process: weights of pipelines, test losses of fused trials."""
    lines = [f"| model | {' | '.join(RUNS)} |", f"| --- |{' --- |' * len(RUNS)}"]
    for name in zoo_runs.JOBS:
        cells = []
        for run in RUNS.values():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    cells.append(f"{run(name, Path(folder)):.1g}")
                except PlaitError as failure:
                    cells.append(f"refused: {' '.join(str(failure).split())}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="models of these names")
    parser.add_argument("--family", action="append", default=[], choices=FAMILIES)
    parser.add_argument("--seconds", type=float, default=180.0, help="of one model at most")
    parser.add_argument("--runs", action="store_true", help="launch real runs of a few of them instead")
    parser.add_argument("--write", type=Path, help="put the rows into this file's table")
    return parser.parse_args()


def main() -> int:
    asked = parse()
    if asked.runs:
        launched = runs_table()
        if asked.write is not None:
            head, _, rest = asked.write.read_text().partition("<!-- runs -->")
            _, table_mark, rest = rest.partition("<!-- table -->")
            asked.write.write_text(f"{head}<!-- runs -->\n\n{launched}\n\n{table_mark}{rest}")
        return 0
    with contextlib.suppress(ImportError):
        from transformers import GenerationMixin, PreTrainedModel  # noqa: F401  (once, not in each process)
    rows = []
    for case in cases():
        if (asked.only and case.name not in asked.only) or (asked.family and case.family not in asked.family):
            continue
        found = {name: judge(case, verdict, asked.seconds) for name, verdict in VERDICTS.items()}
        rows.append(row_of(case, found))
        for name, each in found.items():
            head = f"{case.family:12} {case.name:18} {name:14} {each.word:8} {each.seconds:6.1f} s"
            print(f"{head}  {each.sentence[:300]}", flush=True)
    print(summary(rows))
    if asked.write is not None:
        head, _, before = asked.write.read_text().partition("<!-- table -->")
        every = merge(read_table(before), rows)
        asked.write.write_text(f"{head}<!-- table -->\n\n{summary(every)}\n\n{table(every)}\n")
    return 1 if {word for row in rows for word in row.words} & {"WRONG", "crash"} else 0


if __name__ == "__main__":
    sys.exit(main())
