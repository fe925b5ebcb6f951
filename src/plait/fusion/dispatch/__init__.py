"""Dispatch of torch functions on trial tensors: to a rule, or to a fallback."""
