"""SD-Pipe's and KungFu's experiments: syncs with slow workers, all-reduce over topologies."""
