"""One model over several workers: cut into stages, laid out, executed by a schedule, verified."""
