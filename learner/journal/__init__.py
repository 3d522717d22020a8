"""The learner's memory on disk."""
