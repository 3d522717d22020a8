"""How long a trainer waits for its checkpoints and versions."""
