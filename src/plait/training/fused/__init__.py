"""Trials fused into one model: components with a trials axis."""
