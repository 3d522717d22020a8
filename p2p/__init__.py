"""The swarm: identity, channels, wire protocol, manifests, chunks, weight codec, broadcast scheduler.

Must not know: reinforcement learning, engines, torch modules. It handles bytes, numpy bit views, peers, versions.
"""
