"""The vLLM engine: draws, weights put in place, and what depends on its version."""
