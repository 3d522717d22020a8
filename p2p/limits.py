"""The limits that peers must agree on or be protected by, each with its reason. Sizes are bytes, times are seconds."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
"""Bytes of a kibibyte, a mebibyte and a gibibyte."""

PROTOCOL_VERSION = 11
"""Sent in the first message; a peer with another number is refused, and the reason names both."""

MAX_FRAME = 1 * MIB + 64 * KIB
"""One framed message, header excluded. Checked before allocation, so a peer cannot make us allocate more. The longest
thing that travels whole is the seal of MAX_TENSORS tensors: 1 MiB of their digests, and an envelope."""

MAX_CHUNK = 256 * KIB
"""One chunk of a segment's payload. With its header it stays far below MAX_FRAME; 32 to 256 KiB measured alike."""

CHANNEL_WINDOW = 4 * MIB
"""Bytes a sender may have outstanding before the receiver's application consumes them (application credits).
Covers 400 Mbit/s at 80 ms; keeps us under yamux's 5 s without-window failure since the receiver always drains."""

GREETING_WINDOW = 128 * KIB
"""Bytes outstanding on a channel whose peer has not been admitted yet: enough for its hello, with a ticket of 64 KiB."""

MAX_SEGMENT = 64 * MIB
"""Raw bytes of state one segment may cover: bounds the decoder's working memory."""

DEFAULT_SEGMENT = 8 * MIB
"""Raw bytes per segment unless set: long enough to compress, short enough to overlap encode, wire and decode."""

MAX_STATE = 256 * GIB
"""Total state a manifest may describe: 32B in fp32 is 128 GiB."""

MAX_TENSORS = 65_536
"""Tensors of a state: their 16-byte digests, 1 MiB together, are sealed in one frame."""

MAX_TENSOR_NAME = 512
"""Characters of a tensor's name: a bound on memory, well above the names of Hugging Face models."""

MAX_TABLE = 16 * MIB
"""Bytes of a decompressed tensor table: MAX_TENSORS rows of 256 bytes. Names repeat so much that it fits a frame compressed."""

MAX_SEGMENTS = 65_536
"""Segments of a state: 128 GiB in segments of 2 MiB. Each is an object in memory of whoever reads the header."""

MAX_SEGMENT_CHUNKS = 16_384
"""Chunks of one segment at its raw size: their digests, twice as many for a segment that grew, are one signed record,
which must fit a frame."""

MAX_DESCRIPTOR = 64 * MIB
"""Config, tokenizer and chat template of a model: the largest public tokenizers are near 35 MB."""

MAX_CHUNKS = 4 * MIB
"""Chunks of a version, as its header's sizes allow: 256 GiB in chunks of 128 KiB, twice. A set takes a bit of each, a peer."""

MAX_PEERS = 10_000
"""Entries of a roster; a longer one is refused. A bound on what a roster can make a peer hold, not a size that was measured."""

MAX_CONNECTIONS = 4096
"""Connections of one host: far above a swarm's degree, below what file descriptors allow. A host that has so many refuses
more."""

WRITE_PROGRESS_S = 20.0
"""A connection on which no byte could be written for so long is closed (to cancel a libp2p write would corrupt it)."""

KEEPALIVE_S = 5.0
"""An idle channel sends an empty frame this often, so silence means trouble."""

SILENCE_S = 20.0
"""A channel that heard nothing for so long is closed: four keepalives lost."""

CREDIT_PROGRESS_S = 60.0
"""A peer that is sent nothing more for want of credit, and gives none back for so long, has stopped reading."""

HANDSHAKE_S = 15.0
"""A handshake that is not accepted so long after its stream was opened has failed."""

LEASE_S = 2.0
"""A wanted chunk is asked of another peer when its holder has sent nothing for so long, and about twice its usual delay."""

REPAIR_AFTER_S = 1.0
"""A chunk that the manifest proves, and that no peer has pushed so long after we learned of it, is asked for."""
