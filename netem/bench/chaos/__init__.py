"""Real runs whose processes are killed, and an account of what it cost."""
