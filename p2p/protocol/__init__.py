"""What nodes and the learner say to each other, defined once. Sans-IO: bytes in, typed messages out."""
