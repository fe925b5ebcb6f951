"""Kernels for GPUs, in Triton; only imported where there is a GPU to run them."""
