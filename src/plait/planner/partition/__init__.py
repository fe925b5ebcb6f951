"""The partitioning problem: which layers form a stage, how often each stage is replicated."""
