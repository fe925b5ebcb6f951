"""The policies that a job file can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.adapt.policies.batch_size import AdaptiveBatchSize
from plait.adapt.policies.plan import AdaptivePlan
from plait.adapt.policies.policy import Policy
from plait.adapt.policies.step_table import StepBased
from plait.adapt.policies.sync import AdaptiveSync
from plait.adapt.policies.topology import AdaptiveTopology
from plait.adapt.policies.user_function import FunctionPolicy
from plait.adapt.policies.workers import AdaptiveWorkers
from plait.core.codec import decode
from plait.core.errors import ArtefactError, JobError
from plait.core.names import did_you_mean
from plait.core.shown import shown

POLICIES: Mapping[str, Any] = {
    "batch-size": AdaptiveBatchSize,
    "plan": AdaptivePlan,
    "steps": StepBased,
    "sync": AdaptiveSync,
    "topology": AdaptiveTopology,
    "workers": AdaptiveWorkers,
}


def make_policy(kind: str, options: Mapping[str, Any]) -> Policy:
    """The built-in policy of this kind, or a user's function `package.module:function`."""
    if ":" in kind:
        return FunctionPolicy(kind, options)
    if kind not in POLICIES:
        raise JobError(
            f"adapt.kind: found {shown(kind)}, expected a policy or package.module:function"
            f"{did_you_mean(kind, POLICIES)}"
        )
    try:
        made: Policy = decode(POLICIES[kind], options, f"adapt.{kind}")
    except ArtefactError as failure:
        raise JobError(str(failure)) from None
    return made


def needs_signals(kind: str) -> bool:
    """Whether a policy decides by signals; a table of steps does not."""
    return kind != "steps"


def needs_norms(kind: str) -> bool:
    """Whether a policy uses gradient norms; a user's function may."""
    return kind == "batch-size" or ":" in kind
