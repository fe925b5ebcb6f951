"""Whether what was built computes what the plain model computes, and where they part."""

from plait.verification.compare import Difference, Noise, find_differences, measure_noise, perturb
from plait.verification.observe import (
    Observation,
    RandomState,
    copied_gradient,
    observe_outputs,
    observe_step,
    same_random_numbers,
    unchanged_random_numbers,
)

__all__ = [
    "Difference", "Noise", "Observation", "RandomState", "copied_gradient", "find_differences",
    "measure_noise", "observe_outputs", "observe_step", "perturb", "same_random_numbers",
    "unchanged_random_numbers",
]  # fmt: skip
