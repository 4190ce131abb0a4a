"""What stands around a run: data, the command, reports, the lab. The core does not need it."""
