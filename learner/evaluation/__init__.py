"""Evaluations: how good a version is, measured on the nodes beside training."""
