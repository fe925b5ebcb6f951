"""Policies: pure functions from the signals of a run to changes; testable by replaying recorded signals."""
