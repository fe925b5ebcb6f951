"""Samples to batches: which samples a step uses, how they are read, collated and handed to a worker."""
