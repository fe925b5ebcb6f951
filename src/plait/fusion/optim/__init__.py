"""Optimizers of a fused module: every coefficient has one value per trial."""
