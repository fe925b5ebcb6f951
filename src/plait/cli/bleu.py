"""`plait evaluate --bleu`: the BLEU of a run's checkpoints on the test split."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from plait.cli.show import bleu_table, print_table
from plait.core.errors import InputError
from plait.jobs.evaluate import measure_scores
from plait.launch.run_dir import RunDir
from plait.workloads.translation.beam_search import BeamOptions

MOST_HYPOTHESES = 1000
MOST_PENALTY = 10


def evaluate_bleu(folder: RunDir, best: bool, beam: int, penalties: tuple[float, float], json_: bool) -> None:
    """Print the BLEU of every checkpoint that a run has kept, or of the best one."""
    if not 1 <= beam <= MOST_HYPOTHESES:
        raise InputError(f"--beam: found {beam}, expected 1 to {MOST_HYPOTHESES}")
    for name, penalty in zip(("length", "coverage"), penalties):
        if not 0 <= penalty <= MOST_PENALTY:
            raise InputError(f"--{name}-penalty: found {penalty:g}, expected 0 to {MOST_PENALTY}")
    scores = measure_bleu(folder, BeamOptions(beam, *penalties), best)
    if json_:
        print(json.dumps({"run": str(folder.path), **scores}))
        return
    print(f"{folder.path}: {scores['sentences']} sentences, beam {beam}")
    print_table(bleu_table(scores["checkpoints"]))
    print(f"signature: {scores['signature']}")


def measure_bleu(folder: RunDir, options: BeamOptions, best: bool = False) -> dict[str, Any]:
    """The BLEU on the test split of every checkpoint that a run has kept, or of the best one."""
    rows = measure_scores(folder, {"beam": options}, "--bleu measures translations", best)
    keys = ("step", "bleu", "length_ratio")
    return {
        "sentences": rows[0]["sentences"],
        "signature": rows[0]["signature"],
        "beam": asdict(options),
        "checkpoints": [{key: row[key] for key in keys} for row in rows],
    }
