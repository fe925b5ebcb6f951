"""What the supervisor of a launch is made of: hosts, workers, losses, changes of members."""
