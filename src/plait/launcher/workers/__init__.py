"""Between an agent and its workers: the links, the output, and what the failure of a worker means."""
