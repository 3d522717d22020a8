"""Engines: what generates tokens. The Engine port, its child-process shell, and the adapters."""
