"""Jobs that are changed while they run: what a change costs, and what it brings."""
