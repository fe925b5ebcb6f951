"""What the ranks of test worlds would each load and trace again; the fork server imports it once for all.

It is for worlds alone: importing it traces models, which takes seconds.
"""

import contextlib
import dataclasses
import functools
import os
import sys

import torch
import typer.main
from hypothesis import strategies
from torch.overrides import resolve_name

from plait.cli import app
from plait.core import codec
from plait.fusion.speed import autotune
from plait.launcher.fork_server import import_all
from plait.workloads.data.digits import digits

# With CUDA, tracing looks at the GPU, which a process that was forked then cannot use.
traced = ("support.traces",) if torch.version.cuda is None else ()
import_all(
    [
        *("torch.distributed", "plait.training.worker", "plait.sweeping.worker", "support.world"),
        *(
            "plait.training.engines.choose_sync",
            "plait.training.engines.choose_pipeline_sync",
            "plait.training.engines.pipeline_member",
            "plait.training.stages.run_stages",
        ),
        "plait.sweeping.engines.array_stages",
        # Commands that are forked import these, and those that plan a run or write its report.
        *(
            "plait.__main__",
            "plait.cli",
            "plait.jobs.sweep",
            "plait.report.sweep",
            "plait.measure.profile_job",
        ),
        *("matplotlib.figure", "matplotlib.backends.backend_agg", "rich.progress", "rich.table"),
        # The modules of the tests, which ranks import for their functions, import these.
        *("pytest", "hypothesis.strategies", "plait.schema.job", "support.elastic", "support.plans"),
        *("support.sweeping", "support.syncs"),
        # As workers of pytest-xdist do when they collect them.
        *(
            "tensorboard.backend.event_processing.event_accumulator",
            "h5py",
            "sacrebleu",
            "plait_bench.planner",
            "peft",
            "transformers.models.gpt2.modeling_gpt2",
        ),
        # Torch's optimizers load the first; tracing with free sizes loads the others.
        *("torch._dynamo", "torch.export._trace", "sympy.tensor.tensor"),
        *traced,
    ]
)
digits("train")  # reads the file, which is kept
resolve_name(torch.add)  # lists all functions of torch, once
strategies.text().validate()  # tries all characters there are, once in a clone
# The command line has the same verbs each time, and messages the same fields.
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(app)
for module in [module for name, module in sys.modules.items() if name.startswith("plait.")]:
    for value in list(vars(module).values()):
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            with contextlib.suppress(NameError):  # of a package that is loaded when it is needed
                codec._hints(value)
os.fsync = lambda descriptor: None  # type: ignore[assignment]  # as in tests/conftest.py
# All ways of an operation are right: which one is the fastest is timed once, rather than until it is certain,
# which took a quarter of the time of fused tests.
autotune._MOST_ROUNDS = 1
