"""The door for trainers: a synchronous client of the head, its port and its messages."""
