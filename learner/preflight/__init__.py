"""What can be known of a run before it starts: settings against each other, and against this machine."""
