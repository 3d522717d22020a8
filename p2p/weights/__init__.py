"""A state of weights and its versions: manifests, chunks on disk, the cheapest path to a version, encoding. No torch."""
