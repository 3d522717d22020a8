"""`shoal bench networks`."""
