"""How torch's functions compute for all trials at once: the tensor, its rules, and what has none."""
