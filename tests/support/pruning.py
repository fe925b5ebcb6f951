"""A pruner whose decisions a test knows."""

from __future__ import annotations

import optuna


class EveryOther(optuna.pruners.BasePruner):
    """Prunes trials of even numbers at their second goal."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number % 2 == 0 and len(trial.intermediate_values) == 2
