"""Trials of an array: membership, per-trial values, padding, and modules that run trial by trial."""
