"""One run: components, loop, evaluation, checkpoints, metrics."""
