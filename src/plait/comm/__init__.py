"""Tensors and plain values between two workers: links, channels, store. No algorithms."""
