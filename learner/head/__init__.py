"""The learner's process in the swarm: what it keeps, whom it serves. Thin shells."""
