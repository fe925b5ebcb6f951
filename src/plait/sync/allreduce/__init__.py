"""All-reduce: gradients in buckets, over topologies, measured and chosen."""
