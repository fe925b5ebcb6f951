"""Monitors: plain objects that turn what a loop sees into signals; a user's own loop can hold them."""
