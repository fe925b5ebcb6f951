"""Speed: autotuning, CUDA graphs, torch.compile."""
