"""Samples to batches: which samples a step uses, how they are read, collated and sent to a worker."""
