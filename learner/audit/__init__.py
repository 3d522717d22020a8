"""Checking what nodes generate: each drawn token against the seeded draw that it should be, under the version that it claims."""
