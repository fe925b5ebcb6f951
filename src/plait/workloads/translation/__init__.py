"""Translation: GNMT, and its loss. The data of its examples is in `examples/translation`."""
