"""HFTA's experiments: fused trials against serial ones, processes and vmap."""
