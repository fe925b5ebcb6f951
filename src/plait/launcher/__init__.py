"""Processes, no tensors: a supervisor, an agent on each host, workers, the run directory."""
