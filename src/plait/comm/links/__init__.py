"""Transports between two workers: shared memory, TCP, NCCL, CUDA IPC, or within a process."""
