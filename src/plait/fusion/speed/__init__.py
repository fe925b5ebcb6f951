"""Faster ways to compute the same: chosen by measurement, captured, compiled."""
