"""Verification of fused trials: what they compute together is what each computes alone."""

from plait.fusion.verify.candidates import (
    TF32_EPS,
    BatchCandidate,
    Candidate,
    FirstCallCandidate,
    NothingToCompareError,
)
from plait.fusion.verify.check import FEW_PHASES, PHASES, Verdict, log_verdict, verify_fused

__all__ = [
    "FEW_PHASES", "PHASES", "TF32_EPS", "BatchCandidate", "Candidate", "FirstCallCandidate",
    "NothingToCompareError", "Verdict", "log_verdict", "verify_fused",
]  # fmt: skip
