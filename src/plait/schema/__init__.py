"""What a job may say: its settings as plain values, each default once, and the YAML file at the edge.

A new key is a field of its section in `settings`, with its limits and its default, and a row in docs/jobs.md.
"""
