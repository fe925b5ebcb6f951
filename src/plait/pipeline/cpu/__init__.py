"""Faster CPU implementations of torch layers, with the same result."""
