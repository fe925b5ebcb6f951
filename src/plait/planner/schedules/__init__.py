"""Schedules: the operations of each worker as values; simulated with costs, drawn as a timeline."""
