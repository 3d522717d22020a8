"""What the trainer encodes becomes a signed version of the swarm."""
