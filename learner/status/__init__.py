"""The status of a running learner, for people and for Prometheus."""
