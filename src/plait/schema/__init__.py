"""The schema of a job: its settings as plain values with one default each, and the reader of the YAML file.

To add a key, add a field with its limits and default to its section in `settings`, and a row to docs/jobs.md.
"""
