"""Many trials of one job: a coordinator with its scheduler, and workers that train arrays of trials."""
