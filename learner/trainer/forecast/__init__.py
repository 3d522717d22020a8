"""Bytes that training takes, on the device, on the host and on the disk: counted before a run starts."""
