"""Checks before the first update of a run: its data, its loss, and the state that forward keeps."""
