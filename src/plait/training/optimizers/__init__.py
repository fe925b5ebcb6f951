"""Optimizers of a job: built by name, with parameter groups and a learning-rate schedule."""
