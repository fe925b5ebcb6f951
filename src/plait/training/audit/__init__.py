"""Steps of a run that are taken a second time, as plain PyTorch takes them, and compared."""
