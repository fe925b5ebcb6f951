"""Verifies that fused trials compute the same as each trial's plain model."""

from plait.fusion.verify.candidates import TF32_EPS, CallCandidate, Candidate, NothingToCompareError, calls_on
from plait.fusion.verify.verifier import FEW_PHASES, PHASES, FusionReport, log_report, verify_fused

__all__ = [
    "FEW_PHASES",
    "PHASES",
    "TF32_EPS",
    "CallCandidate",
    "Candidate",
    "FusionReport",
    "NothingToCompareError",
    "calls_on",
    "log_report",
    "verify_fused",
]  # fmt: skip
