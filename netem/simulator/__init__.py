"""Production's broadcast sessions on simulated links. Pure."""
