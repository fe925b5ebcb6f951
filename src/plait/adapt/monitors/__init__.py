"""Monitors: plain objects that turn measurements of a loop into signals; usable in a user's loop."""
