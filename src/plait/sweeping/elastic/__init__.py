"""Sweeps whose workers come and go: which worker has which trials, and how it is a member."""
