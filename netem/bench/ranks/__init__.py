"""Peak memory of each rank of a sharded trainer."""
