"""Verification of fused trials: what they compute together is what each computes alone."""

from plait.fusion.verify.check import (
    FEW_SCENES,
    SCENES,
    TF32_EPS,
    Rehearsal,
    Verdict,
    log_verdict,
    verify_fused,
)
from plait.fusion.verify.rehearsals import BatchRehearsal, CallRehearsal, NothingToCompareError

__all__ = [
    "FEW_SCENES", "SCENES", "TF32_EPS", "BatchRehearsal", "CallRehearsal", "NothingToCompareError",
    "Rehearsal", "Verdict", "log_verdict", "verify_fused",
]  # fmt: skip
