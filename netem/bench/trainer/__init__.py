"""The trainer alone, without a swarm: what its steps keep in memory, and how many tokens it trains on a second."""
