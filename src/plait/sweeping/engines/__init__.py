"""How the trials of an array take their steps: fused, unfused, in stages, led by one of several workers."""
