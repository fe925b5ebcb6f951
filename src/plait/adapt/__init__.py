"""Adapt: what a run measures in, changes of the running job out.

Monitors turn gradients and times into signals, policies turn signals into changes. Nothing here applies a
change: the training loop alone does, between two steps.
"""
