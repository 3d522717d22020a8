"""Every constant of the swarm in one place, each with its reason. Sizes are bytes, times are seconds."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

PROTOCOL_VERSION = 8
"""Spoken in the first message; a peer with another number is refused with both numbers in the reason."""

MAX_FRAME = 1 * MIB + 64 * KIB
"""One framed message, header excluded. Checked before allocation, so a peer cannot make us allocate more. The longest
thing that travels whole is the seal of MAX_TENSORS tensors: 1 MiB of their digests, and an envelope."""

MAX_CHUNK = 256 * KIB
"""One chunk of a segment's payload. With its header it stays far below MAX_FRAME; 32 to 256 KiB measured alike."""

CHANNEL_WINDOW = 4 * MIB
"""Bytes a sender may have outstanding before the receiver's application consumes them (application credits).
Covers 400 Mbit/s at 80 ms; keeps us under yamux's 5 s without-window failure since the receiver always drains."""

GREETING_WINDOW = 128 * KIB
"""The same, of a channel whose peer has not been admitted: its hello, a ticket of 64 KiB included."""

MAX_SEGMENT = 64 * MIB
"""Raw bytes of state one segment may cover: bounds the decoder's working memory."""

DEFAULT_SEGMENT = 8 * MIB
"""Raw bytes per segment unless set: long enough to compress, short enough to overlap encode, wire and decode."""

MAX_STATE = 256 * GIB
"""Total state a manifest may describe: 32B in fp32 is 128 GiB."""

MAX_TENSORS = 65_536
MAX_TENSOR_NAME = 512

MAX_TABLE = 16 * MIB
"""A tensor table once decompressed: MAX_TENSORS rows of 256 bytes. Names repeat so much that it travels in a frame."""

MAX_SEGMENT_CHUNKS = 16_384
"""Chunks of one segment at its raw size: their digests, twice as many for a segment that grew, are one signed record,
which must fit a frame."""

MAX_DESCRIPTOR = 64 * MIB
"""Config, tokenizer and chat template of a model: the largest public tokenizers are near 35 MB."""

MAX_PEERS = 10_000
"""Entries in a roster."""

MAX_CONNECTIONS = 4096
"""Of one host: far above a swarm's degree, below what file descriptors allow. At it, new connections are refused."""

WRITE_PROGRESS_S = 20.0
"""A writer that moves no byte for so long closes its connection (cancelling a libp2p write would corrupt it)."""

KEEPALIVE_S = 5.0
"""A channel with nothing to say sends an empty frame so often, so silence means trouble."""

SILENCE_S = 20.0
"""A channel that heard nothing for so long is closed: four keepalives lost."""

CREDIT_PROGRESS_S = 60.0
"""A peer that is sent nothing more for want of credit, and gives none back for so long, has stopped reading."""

HANDSHAKE_S = 15.0
"""From an open stream to an accepted handshake."""

LEASE_S = 2.0
"""A wanted chunk is asked of another peer when its holder has sent nothing for so long, and about twice its usual delay."""

REPAIR_AFTER_S = 1.0
"""A chunk that the manifest proves, and that no peer has pushed so long after we learned of it, is asked for."""
