"""Verifies that stages compute the same as the plain model, on batches of the job."""
