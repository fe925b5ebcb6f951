"""Objects for a training loop of one's own: each capability can be used without the others."""
