"""Every decoder of a peer's bytes under random mutation: nothing but a refusal, within 50 ms and 64 MiB each."""
