"""Transports between two workers: shared memory, TCP, gloo, NCCL, CUDA IPC."""
