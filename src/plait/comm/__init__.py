"""Tensors and plain values between two workers: links, channels, mailbox, store. No algorithms."""
