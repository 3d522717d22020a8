"""The weight codec: a segment's words to a payload and back, lossless for any bit pattern, hostile input refused.

Must not know files, manifests or peers. Each coding is one file behind `registry`.
"""

from p2p.codec.registry import NOTHING_CHANGED, decode_segment, encode_segment, warm

__all__ = ["NOTHING_CHANGED", "decode_segment", "encode_segment", "warm"]
