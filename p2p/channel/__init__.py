"""The Channel port: ordered messages between two authenticated peers; libp2p adapter here, in-memory twin in tests/support."""
