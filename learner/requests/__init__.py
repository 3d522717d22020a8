"""Requests that no step trains on: evaluation and serving. The port, and the books about them."""
