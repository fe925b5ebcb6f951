"""Sweeps from a job: what to try, checked key by key, then run on the job's workers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.artefact import load, text_of
from plait.core.codec import encode
from plait.core.errors import InputError, JobError
from plait.core.names import did_you_mean, searching
from plait.core.shown import shown
from plait.jobs.study import GivenStudy, shared_study
from plait.launcher.display import Display, Silent
from plait.launcher.environment import check_alone
from plait.launcher.launchers import Launcher
from plait.launcher.launchers.attempts import run_on_hosts
from plait.launcher.run import LaunchedRun, tracing_modules
from plait.launcher.run_dir import RunKind, choose_folder, new_run
from plait.launcher.supervisor import Supervisor
from plait.report.sweep import write_sweep
from plait.schema.aliases import KEY_ALIASES, canonical_value
from plait.schema.hosts import LOCAL, Host
from plait.schema.job import Job, as_job, make_job
from plait.schema.placement import Placement
from plait.schema.plans.schedules import Schedule
from plait.schema.results import SweepResult
from plait.schema.settings import (
    SEARCHES,
    CommonSettings,
    ModelSettings,
    SearchSettings,
    StudySettings,
    SyncSettings,
    TrainSettings,
)
from plait.sweeping.array_workers import check_worker_groups
from plait.sweeping.engines.array_plans import check_in_stages, check_schedule
from plait.sweeping.search.compared_by import choose_metric
from plait.sweeping.search.space import (
    MOST_VALUES,
    Dimension,
    combinations,
    count_combinations,
    parse_dimension,
)
from plait.sweeping.search.values import check
from plait.sweeping.settings import KIND, VERSION, SweepSettings
from plait.sweeping.trial_settings import OF_SWEEP, check_key, with_lora_array
from plait.sweeping.trials.trial_files import trial_folder
from plait.workloads.from_transformers import factory_of, saved_weights_id

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

# Combinations that are checked one by one before anything starts; of more, the values of each key are.
CHECKED = 2000
# Parts of keys, with those of a job file.
_AS_WRITTEN = {"model.args": "model_args", "model.adapter": "lora", "model.factory": "model", ".options": ""}

Over = Sequence[str] | Mapping[str, Any]


def sweep(
    job: Job | str | Path | Mapping[str, Any],
    over: Over = (),
    *,
    search: str | None = None,
    trials: int | None = None,
    width: int | None = None,
    replicas: int | None = None,
    eta: int | None = None,
    least_steps: int | None = None,
    metric: str | None = None,
    seed: int | None = None,
    study: optuna.Study | str | None = None,
    storage: str | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
    callbacks: Sequence[object] | None = None,
    resume: str | None = None,
    run_folder: str | None = None,
    display: Display | None = None,
) -> SweepResult:
    """Train trials of `job` with the values of `over` put over it; what each came to, best first.

    The result's `run` is the folder with the best trial's checkpoint.

    Args:
        job: a job, its content, or the path of its file.
        over: as on the command line, `["optimizer.lr=log:1e-4:1e-1:16"]`, or a mapping from keys to lists of
            values or to such ranges: `{"optimizer.lr": "log:1e-4:1e-1", "optimizer.momentum": [0.0, 0.9]}`.
        search: how trials are drawn and dropped, such as `grid` or `asha`: docs/sweep.md lists them.
        trials: how many to draw, where the search draws them.
        width: trials of an array; measured unless given.
        replicas: of the job's workers, how many train each array together; where the job has a plan, how
            many times the workers of the plan.
        eta: the share of trials that go on, one in `eta`, where the search drops some.
        least_steps: the steps after which trials are first compared.
        metric: what trials are compared by; the loss unless given.
        seed: what random draws of values depend on.
        study: an `optuna.Study`, or the name of one in `storage`, that draws the trials and decides which go
            on. A study in memory has the trials at the end.
        storage: the URL of an Optuna storage.
        sampler: `package.module:name` of an Optuna sampler.
        pruner: `package.module:name` of an Optuna pruner.
        callbacks: as those of `plait.train`, besides the job's; each trial has its own copies, in the
            process of the sweep's coordinator.
        resume: the folder of a sweep that goes on, as it was asked for; `job` says where its workers run.
            Another `width` and other `replicas` change how its arrays are made, and more `trials` are drawn
            where the search draws them one by one.
        run_folder: the folder of the sweep, in place of a new one.

    Examples:
        ```py
        result = plait.sweep("digits.yaml", {"optimizer.lr": "log:1e-3:1:8"})
        result.best.values
        ```
    """
    check_alone()
    if resume is not None and callbacks:
        raise InputError("callbacks: found some with resume; the sweep goes on with those it was begun with")
    asked = {"search": search, "eta": eta, "least_steps": least_steps, "metric": metric, "seed": seed}
    shared = shared_study(study, storage=storage, sampler=sampler, pruner=pruner)
    shown_on = display or Silent()

    job, files = as_job(job), shared.files
    if callbacks:
        from plait.jobs.from_objects import with_callbacks

        job, kept = with_callbacks(job, callbacks)
        files = {**files, **kept.files}

    def run(here: Job, launcher: Launcher, before: Path | None) -> SweepResult:
        resumed = resume if before is None else str(before)
        every = {"width": width, "replicas": replicas, "trials": trials, **asked}
        return _sweep_on(here, over, every, shared, files, resumed, run_folder, shown_on, launcher)

    return run_on_hosts(job, shown_on, run)


def _sweep_on(
    job: Job,
    over: Over,
    asked: Mapping[str, Any],
    shared: GivenStudy,
    files: Mapping[str, bytes],
    resume: str | None,
    run_folder: str | None,
    display: Display,
    launcher: Launcher,
) -> SweepResult:
    """Run a sweep on the hosts of `job`, or go on with the one in the folder `resume`."""
    run_dir = Path(job.run_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(searching(os.getcwd(), job.folder))
        named = run_folder if resume is None else resume
        folder = choose_folder(run_dir, job.name, resume is not None, named, RunKind.SWEEP)
        before = None
        if resume is not None and folder is not None:
            before = load(SweepSettings, folder.sweep, KIND, VERSION)
            shared.check_resumed(before.search.study)
            settings = go_on(before, **asked)
            _warn_of_changes(before, job)
        else:
            given = {name: value for name, value in asked.items() if value is not None}
            settings = make_sweep(job, over, **{**given, **shared.choose(asked["search"], job.name)})
            shared.check(settings)
        placement = placement_of(job, settings)
        folder = folder or new_run(run_dir, job.name)
        content = encode(settings)
        record = {} if settings == before else {folder.sweep: text_of(content, KIND, VERSION)}
        job_text = "" if resume is not None else job.text()
        start = partial(Supervisor, launcher=launcher)
        objects = files if resume is None else {}
        # The coordinator finds objects of a study, and callbacks, as it finds modules.
        stack.enter_context(searching(str(folder.path.absolute()) if files or resume else None))
        run = LaunchedRun(
            RunKind.SWEEP, folder, display, resume is not None, record, job_text, start, objects
        )
        answer = run.supervise(
            "plait.sweeping.worker",
            content,
            placement,
            tracing_modules(settings.train),
            coordinator="plait.sweeping.coordinator:coordinate",
        )
    result = replace(SweepResult.of_plain(answer, "result"), run=str(folder.path))
    write_sweep(folder.path, result)
    if result.best is not None and settings.train.model.lora_array is not None:
        from plait.jobs.adapter import save_adapter  # slow to import
        from plait.training.fused.shared_bases import base_held_once

        with searching(os.getcwd(), job.folder), base_held_once():
            save_adapter(folder)
            for trial in result.trials if settings.keeps_adapters else ():
                if (own := trial_folder(folder, trial.trial)).settings.exists():
                    save_adapter(own)
    shared.receive(folder)
    return result


def _base_of(model: ModelSettings) -> str | None:
    """What tells the weights that trials begin with from others, if they are in a folder here."""
    path = model.args.get("path")
    return saved_weights_id(path) if isinstance(path, str) and factory_of(model.factory) is not None else None


def _check_base(settings: SweepSettings) -> None:
    """Raise InputError if the trials to come would begin with other weights than those before."""
    model, begun = settings.train.model, settings.base
    if begun is not None and (now := _base_of(model)) is not None and now != begun:
        raise InputError(
            f"model_args.path: {model.args['path']} holds other weights than when the sweep was begun, which "
            f"would make its trials unlike models; put them back, or begin another sweep"
        )


def _warn_of_changes(begun: SweepSettings, job: Job) -> None:
    """Say what of a job is not as it was when its sweep was begun, and so is not followed."""
    now = with_lora_array(job.settings(), begun.over)
    kept = {each.name for each in fields(CommonSettings)} - set(OF_SWEEP)
    pairs = ((name, encode(getattr(begun.train, name)), encode(getattr(now, name))) for name in sorted(kept))
    if changed := [difference for each in pairs for difference in _differences(*each)]:
        log.warning(
            "the sweep goes on with the job that it was begun with, not with this one, in which %s; begin "
            "another sweep for that",
            " and ".join(changed[:3]) + (f" and {len(changed) - 3} more keys differ" if changed[3:] else ""),
        )


def _differences(key: str, then: Any, now: Any) -> Iterator[str]:
    """The keys below `key` whose values differ, with both."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            yield from _differences(f"{key}.{name}", then.get(name), now.get(name))
    elif then != now:
        for within, own in _AS_WRITTEN.items():
            key = key.replace(within, own)
        yield f"{key} is {shown(now)} (was {shown(then)})"


def go_on(
    settings: SweepSettings,
    *,
    width: int | None = None,
    replicas: int | None = None,
    trials: int | None = None,
    **asked: Any,
) -> SweepSettings:
    """The settings that a sweep goes on with, of what it was begun with and what is asked for now.

    What would compare its trials in another way than those that have ended is refused.
    """
    _check_base(settings)
    search = settings.search
    known = {"search": search.kind, **{name: getattr(search, name) for name in asked if name != "search"}}
    if asked.get("metric") is not None and search.metric == "auto":
        known["metric"] = choose_metric(settings)
    for name, value in asked.items():
        if value is not None and value != known[name]:
            raise InputError(
                f"--{name.replace('_', '-')}: found {shown(value)}, but the sweep was begun with "
                f"{shown(known[name])}, by which its trials are compared; leave it out, or begin another"
            )
    if trials is not None and trials != search.trials:
        search = replace(search, trials=_more_trials(search, trials))
    settings = replace(
        settings,
        search=search,
        width=settings.width if width is None else width,
        replicas=settings.replicas if replicas is None else replicas,
    )
    check(settings)
    return settings


def _more_trials(search: SearchSettings, trials: int) -> int:
    """How many trials a sweep that goes on has; more than before, where each is drawn by itself."""
    if search.trials is None or search.kind not in ("random", "asha", "study"):
        why = "lists its trials" if search.trials is None else "compares all of its trials with each other"
        raise InputError(
            f"--trials: found {trials}, but --search {search.kind} {why}, so that no other can join now; "
            f"leave it out, or begin another sweep"
        )
    if trials < search.trials:
        raise InputError(
            f"--trials: found {trials}, but the sweep was begun with {search.trials}, some of which may have "
            f"ended; expected as many or more"
        )
    return trials


def make_sweep(
    job: Job,
    over: Over,
    search: str = SearchSettings.kind,
    trials: int | None = None,
    width: int | None = None,
    eta: int = SearchSettings.eta,
    least_steps: int | None = None,
    *,
    metric: str = SearchSettings.metric,
    seed: int = SearchSettings.seed,
    replicas: int | None = None,
    study: StudySettings | None = None,
) -> SweepSettings:
    """A checked sweep: every value of every key makes a valid job."""
    if search not in SEARCHES:
        hint = did_you_mean(search, SEARCHES)
        raise InputError(f"--search: found {shown(search)}, expected one of {', '.join(SEARCHES)}{hint}")
    if least_steps is not None and least_steps < 1:
        raise InputError(f"--least-steps: found {least_steps}, expected 1 or more")
    if trials is not None and trials > MOST_VALUES:
        raise InputError(f"--trials: found {shown(trials)}, expected {MOST_VALUES:,} at most")
    chosen = SearchSettings(search, trials, eta, least_steps, metric, seed, study or StudySettings())
    written = _dimensions(over)
    dimensions = tuple(map(_in_own_spelling, written))
    train = with_lora_array(job.settings(), dimensions)
    settings = SweepSettings(
        train, dimensions, chosen, width, 1 if replicas is None else replicas, _base_of(train.model)
    )
    for dimension in dimensions:
        check_key(dimension.key)
    if settings.keeps_adapters and search in ("asha", "halving", "pbt"):
        log.warning(
            "--search %s compares losses of trials whose data differs here, and drops the worse ones; "
            "--search grid trains all",
            search,
        )
    has_plan = job.parallel.plan != "data-parallel"
    # With a plan, the options of a sync are for its pipelines.
    check(replace(settings, train=replace(settings.train, sync=SyncSettings())) if has_plan else settings)
    _check_values(job, written, listed=trials is None)
    if has_plan:
        settings = replace(settings, train=_with_plan(job, settings))
        check(settings)
    return settings


def _with_plan(job: Job, settings: SweepSettings) -> TrainSettings:
    """The job of the sweep with its plan, under a synchronous schedule."""
    from plait.measure.auto_plan import planned

    parallel = job.parallel
    # Before the job is measured, which takes a while.
    check_in_stages(settings)
    if parallel.schedule is not None:
        check_schedule(parallel.schedule)
    placement = _placement_of_replica(job.placement, settings) if parallel.needs_planning else job.placement
    schedule = parallel.schedule or (Schedule.FLUSH if parallel.needs_planning else None)
    # Groups of workers come and go; the plan of each stays as it is.
    fixed = replace(placement, elastic=None)
    made, plan = planned(settings.train, fixed, replace(parallel, schedule=schedule))
    if parallel.plan == "model-parallel":
        # It says where the stages are cut; microbatches may follow one another through them.
        assert schedule is not None
        plan = replace(plan, schedule=schedule, depths=())
    return made.with_stages(plan=plan)


def _placement_of_replica(placement: Placement, settings: SweepSettings) -> Placement:
    """The first of the workers, as many as each replica of a plan has."""
    if placement.workers % settings.replicas:
        raise InputError(
            f"--replicas: found {settings.replicas}, which does not divide the {placement.workers} workers "
            f"that a plan is made for; use -np {settings.replicas} times the workers of a plan"
        )
    left, hosts = placement.workers // settings.replicas, []
    for host in placement.hosts:
        hosts.append(replace(host, slots=min(host.slots, left)))
        left -= hosts[-1].slots
    return replace(placement, hosts=tuple(host for host in hosts if host.slots))


def placement_of(job: Job, settings: SweepSettings) -> Placement:
    """Where a sweep's workers run: as many as train an array together, where the job does not say.

    Workers that cannot train the sweep's arrays are refused.
    """
    placement = job.placement
    if settings.workers_per_array > 1 and job.parallel.workers is None and not job.hosts:
        placement = replace(placement, hosts=(Host(LOCAL, settings.workers_per_array),))
    check_worker_groups(settings, placement.workers)
    return placement


def _in_own_spelling(dimension: Dimension) -> Dimension:
    key = dimension.key
    try:
        values = tuple(canonical_value(key, value) for value in dimension.values)
    except JobError as failure:
        raise JobError(f"--over {failure}") from None
    return replace(dimension, key=KEY_ALIASES.get(key, key), values=values)


def _dimensions(over: Over) -> tuple[Dimension, ...]:
    """The dimensions of the sweep, with keys as the user wrote them."""
    if not isinstance(over, Mapping):
        texts = [over] if isinstance(over, str) else over
        return tuple(parse_dimension(text) for text in texts)
    dimensions = []
    for key, values in over.items():
        if isinstance(values, str):
            dimensions.append(parse_dimension(f"{key}={values}"))
        elif isinstance(values, Sequence) and values:
            dimensions.append(Dimension(key, tuple(values)))
        else:
            raise InputError(
                f"over[{shown(key)}]: found {shown(values)}, expected a list of values or a range, such as "
                f"'log:1e-4:1e-1'"
            )
    return tuple(dimensions)


def _check_values(job: Job, dimensions: Sequence[Dimension], listed: bool) -> None:
    """Refuse a key or a value that makes no valid job, with the job file's own words.

    Where all combinations are `listed`, refuse too many of them.
    """
    if listed:
        combinations(dimensions)
    samples = [Dimension(d.key, d.samples()) for d in dimensions]
    together = len(samples) > 1 and count_combinations(samples) <= CHECKED
    few = combinations(samples) if together else []
    for values in [*({each.key: value} for each in samples for value in each.values), *few]:
        try:
            make_job(job.content, list(values.items()))
        except JobError as failure:
            raise JobError(f"--over {failure}") from None
