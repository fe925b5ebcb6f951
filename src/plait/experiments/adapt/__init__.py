"""Runs that watch and change themselves, beside runs that do not."""
