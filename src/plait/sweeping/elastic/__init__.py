"""Sweeps whose workers come and go: which workers train together, and how one becomes a member."""
