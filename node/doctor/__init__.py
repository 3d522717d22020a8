"""`shoal doctor`: whether a node would run on this machine, and what to do where it would not."""
