"""`shoal bench codec`."""
