"""`shoal bench engine`: a node's engine beside vLLM's own, in one run."""
