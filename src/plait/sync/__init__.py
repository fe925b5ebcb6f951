"""Replicas agree: gradients of each worker in, the same gradients on all of them out."""
