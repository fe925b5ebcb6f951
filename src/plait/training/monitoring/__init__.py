"""Monitors of a run's steps: what each engine measures for signals, and how workers exchange it."""
