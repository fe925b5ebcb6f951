"""Sweeps whose workers come and go: which worker has which trials, and which worker coordinates."""
