"""`shoal demo`: a learner and nodes on one machine, watched, disturbed, and reported on."""
