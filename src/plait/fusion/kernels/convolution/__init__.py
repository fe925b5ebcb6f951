"""Convolutions of all trials; `trial_convolution` selects among the ways to load their images."""
