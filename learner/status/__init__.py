"""What a run says of itself while it runs, for people and for Prometheus."""
