"""Arrays in stages, and the verification and audit of fused trials."""
