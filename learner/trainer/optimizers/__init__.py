"""Optimizers by name, and the learning rate of a step."""
