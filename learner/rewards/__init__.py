"""Scores for what strangers wrote."""
