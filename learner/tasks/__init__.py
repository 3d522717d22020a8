"""Tasks: prompts by seed, rewards. The Task port, and how a task is made from its name."""
