"""`torchrun -m plait.worker JOB`: train a job with processes that another launcher starts.

    torchrun --nproc-per-node 4 -m plait.worker job.yaml --set epochs=3
    srun --ntasks 8 python -m plait.worker job.yaml

The same run as `plait train`, with the same options where they have a meaning here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from plait.core.errors import PlaitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Take part in the run of a job; returns the exit status.

    A run that was asked to stop ends with 0, or torchrun would start it again; with --resume-or-start, which
    is for launchers that are to do so, it ends with 130.
    """
    parser = argparse.ArgumentParser(prog="plait.worker", description="Train a job as one of its workers.")
    parser.add_argument("job", help="the job file (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument("--plan", help="a plan file, data-parallel or model-parallel")
    parser.add_argument("--resume", action="store_true", help="go on from the last run's newest checkpoint")
    parser.add_argument(
        "--resume-or-start",
        action="store_true",
        help="go on in the run of --run-folder or, if there is none yet, start it",
    )
    # torchrun takes --run for the start of an option of its own.
    parser.add_argument(
        "--run-folder", "--run", help="the run folder to use or, with --resume, to go on in", dest="run"
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="show no progress")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    asked = parser.parse_args(arguments)
    if asked.resume_or_start and asked.run is None:
        parser.error("--resume-or-start needs --run-folder, the folder that a restarted run goes on in")
    try:
        return _train(asked)
    except PlaitError as failure:
        if not getattr(failure, "is_told", False):
            print(f"plait: {failure}", file=sys.stderr)
        return failure.exit_status


def _train(asked: argparse.Namespace) -> int:
    from plait.api.world import init
    from plait.cli.train import STOPPED, show_result, show_warnings
    from plait.core.files import expand_path
    from plait.jobs.joined import train_joined
    from plait.launcher.run_dir import RunDir
    from plait.report.terminal import RunDisplay

    has_begun = asked.resume_or_start and RunDir(Path(expand_path(asked.run))).record.exists()
    chosen = [("parallel.plan", asked.plan)] if asked.plan is not None else []
    with RunDisplay(asked.quiet or asked.json) as display:
        result = train_joined(
            asked.job,
            [*asked.set, *chosen],
            resume=asked.resume or has_begun,
            run_folder=asked.run,
            display=display,
        )
    if init().is_first and asked.json:
        print(json.dumps(result.to_dict()))
    elif init().is_first:
        show_warnings(result.warnings, asked.quiet)
        show_result(result)
    return STOPPED if asked.resume_or_start and result.reason == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main())
