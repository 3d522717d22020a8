"""Who may come to a run: its tickets, who came by which, and who is banned. On disk, by commands, and at the head's gate."""
