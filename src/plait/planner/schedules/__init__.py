"""Schedules: what each worker does and when, as values; replayed with costs, drawn as a timeline."""
