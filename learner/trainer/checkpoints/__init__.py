"""Checkpoints: written, read, deleted."""
