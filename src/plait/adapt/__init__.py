"""Adapt: measurements of a run in, changes of the running job out.

Monitors turn gradients and times into signals, policies turn signals into changes. Nothing here applies a
change; the training loop does, between two steps.
"""
