"""Environments: what answers a model's turn. The port between rollouts and whoever runs the episodes."""
