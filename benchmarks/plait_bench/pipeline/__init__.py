"""PipeDream's experiments: schedules against data parallelism and torch.distributed.pipelining."""
