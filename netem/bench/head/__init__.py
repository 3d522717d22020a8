"""`shoal bench head`."""
