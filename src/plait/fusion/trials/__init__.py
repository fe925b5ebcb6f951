"""Trials of an array: who is in it, what each has of its own, and each of them alone."""
