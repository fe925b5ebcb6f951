"""Stages: a traced model and a plan's layers in, modules that run, or source that runs without Plait, out."""
