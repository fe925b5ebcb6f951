"""Speed: autotuning, CUDA graphs, and layers that are computed together with what follows them."""
