"""What the settings of a run name: its model and data, in their precision, and the memory for them."""
