"""Optimizers of a fused module: every coefficient one number per trial."""
