"""The partitioning problem: which layers form a stage, and how many replicas each stage has."""
