"""Speed: autotuning, CUDA graphs, products on a CPU, batch norms fused with what follows."""
