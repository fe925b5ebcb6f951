"""A job measured on its own workers: profile, cost of sums and messages, and the plan made from them."""
