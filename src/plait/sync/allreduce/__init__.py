"""All-reduce: gradients in buckets, over topologies that are given or chosen by measurement."""
