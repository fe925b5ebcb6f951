"""Search algorithms as pure functions: the values of trials, and which of them continue."""
