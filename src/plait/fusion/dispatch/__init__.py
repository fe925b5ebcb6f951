"""Tensors of all trials, and the dispatch of torch functions on them: to a rule, or to a fallback."""
