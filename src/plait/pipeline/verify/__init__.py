"""Whether stages compute what the plain model computes, on batches of the job."""
