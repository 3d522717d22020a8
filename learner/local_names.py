"""Names of hosts that no web site can have. Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_local_name(host: str) -> bool:
    """Whether a request's Host is none that a web site may have: a page from elsewhere whose name was made to point here
    (DNS rebinding) could else read what a browser's user is not asked about. The port is known, so that would be easy."""
    name = host
    try:
        name = urlsplit(f"//{host}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost")
    return True
