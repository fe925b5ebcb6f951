"""Measures a job on its workers: profile, costs of all-reduce and messages, and the plan from them."""
