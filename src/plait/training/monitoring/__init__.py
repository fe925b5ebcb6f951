"""Monitors of a run's steps: what each engine measures for signals, and how workers come to know it all."""
