"""Trials in a forward: its function mode, what they share, and modules that run trial by trial."""
