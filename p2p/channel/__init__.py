"""The Channel port: ordered messages between two authenticated peers. libp2p and in-memory adapters, one suite."""
