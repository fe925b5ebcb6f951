"""Verifies that what was built computes the same as the plain model, and locates differences."""

from plait.verification.compare import Difference, Noise, find_differences, measure_noise, perturb
from plait.verification.observe import (
    BUFFER,
    GRADIENT,
    Observation,
    RandomState,
    copied_gradient,
    first_names,
    observe_outputs,
    observe_step,
    same_random_numbers,
    unchanged_random_numbers,
)

__all__ = [
    "BUFFER", "GRADIENT", "Difference", "Noise", "Observation", "RandomState", "copied_gradient",
    "find_differences", "first_names", "measure_noise", "observe_outputs", "observe_step", "perturb",
    "same_random_numbers", "unchanged_random_numbers",
]  # fmt: skip
