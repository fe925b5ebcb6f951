"""Synchronization of replicas: all-reduce of gradients, and averaging of weights."""
