"""`shoal bench broadcast`."""
