"""Spreading a version: the pure session, and the exchange that moves its decisions over channels."""
