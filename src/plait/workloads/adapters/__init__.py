"""Adapters of the PEFT library on a frozen base: their forms, and jobs that name them."""
