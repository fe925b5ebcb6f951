"""Plans, model graphs and clusters, as plain values."""
