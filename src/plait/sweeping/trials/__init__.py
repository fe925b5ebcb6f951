"""The trials of a worker: what they are while they train, where their files are, who assigns them."""
