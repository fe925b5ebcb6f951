"""Reports: a run's events in, tables, plots and pages out. Nothing here runs a model."""
