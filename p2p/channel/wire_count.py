"""What Linux counts of a TCP connection: every byte of it on the wire. Must not know libp2p or who asks.

Counted are the payload (Noise and yamux included), what was sent again, and of each packet, acknowledgements included, the
headers of TCP with timestamps, IP and Ethernet: what the counters of a network card show. Not counted: what TCP received twice.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from p2p.allowance.meter import WireCount

HEADERS = {socket.AF_INET: 66, socket.AF_INET6: 86}
"""Bytes of a packet's headers: Ethernet 14, IP 20 or 40, TCP 20 and 12 of timestamps, which Linux uses unless told not to."""

_COUNTS = struct.Struct("=128xQII56xQQ")
"""Of struct tcp_info (linux/tcp.h, Linux 4.19 and later): bytes_received at 128, segs_out at 136, segs_in at 140, bytes_sent at
200, bytes_retrans at 208."""


def wire_count(sock: socket.socket) -> WireCount | None:
    """The counts of a connected TCP socket; None where the kernel does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        received, out, into, sent, resent = _COUNTS.unpack(info)
    except (OSError, struct.error):  # closed just now, or an old kernel
        return None
    each = HEADERS.get(sock.family, HEADERS[socket.AF_INET6])
    return WireCount(sent, resent, received, each * out, each * into)


_SO_BUF_LOCK = 72
"""The number of a socket option of Linux 5.14: whether the kernel may size the buffers by itself again."""


def clamp_window(sock: socket.socket, nbytes: int) -> None:
    """Let the peer have at most so many bytes under way from now on; 0: as many as the kernel likes."""
    if not hasattr(socket, "TCP_WINDOW_CLAMP"):
        return
    with suppress(OSError):  # closed just now, or an old kernel
        if nbytes:  # the kernel raises the clamp by itself as long as it may size the buffer
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
        else:
            sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, nbytes or 1 << 30)
