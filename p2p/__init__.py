"""The swarm: identity, channels, wire protocol, membership, manifests and chunks of weights, their codec, the broadcast.

Must not know: reinforcement learning, engines, torch modules. It handles bytes, numpy bit views, peers, versions.
"""
