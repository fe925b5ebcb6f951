"""How bytes travel between two workers: shared memory, TCP, gloo, NCCL, CUDA IPC."""
