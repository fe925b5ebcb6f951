"""Cuts a traced model into stages: modules that run, or source code that runs without Plait."""
