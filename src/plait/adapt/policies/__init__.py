"""Policies: pure functions from the signals of a run to changes; replaying recorded signals tests them."""
