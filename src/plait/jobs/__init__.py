"""A job file in, a result out: the functions behind `plait train` and `plait sweep`."""
