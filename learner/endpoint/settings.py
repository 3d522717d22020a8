"""Settings of the endpoint. Must not know how it works."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from pydantic import Field, field_validator

from learner.section import Section


class HostPort(NamedTuple):
    """Where a server listens."""

    host: str
    """an IP address"""
    port: int
    """0: any that is free"""


class EndpointSection(Section):
    """The endpoint: OpenAI's and vLLM's routes over HTTP, for whoever wants to sample from the current policy."""

    listen: str = ""
    """ADDRESS:PORT to listen on, as 127.0.0.1:7463; port 0 is any free one. "" opens no endpoint: it gives away the nodes' time,
    so a run has one only when it says so. Beyond loopback the key travels in plain text: put a proxy with TLS before it."""
    model: str = ""
    """Name of the model in requests and answers. "" is the run's `model`."""
    key_env: str = ""
    """Environment variable that holds the key. "" makes a key at the first start and keeps it in endpoint.key of the run
    directory, which only you can read."""
    hosts: list[str] = Field(default_factory=list)
    """Names by which clients may call the endpoint (the Host header), beside addresses, localhost and names without a dot."""
    max_model_len: int = Field(default=0, ge=0)
    """Most tokens of prompt and answer together. 0 is what the model's config says."""
    sequences: int = Field(default=128, ge=1, le=4096)
    """Most sequences that one request may ask for: its prompts times n."""
    connections: int = Field(default=4096, ge=1, le=32768)
    """Most connections at once. Further ones are told to come later (503)."""
    body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30)
    """Most bytes of a request's body."""
    receive_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that a client has to send a whole request, and for which an idle connection is kept."""
    send_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds that a client may take no byte of its answer. Then its connection is cut, and its sequences are cancelled."""
    request_s: float = Field(default=3600.0, gt=0)
    """Seconds that a request may take in all; after that it is answered with 504."""

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value:
            read_listen(value)
        return value


def read_listen(text: str) -> HostPort:
    """ADDRESS:PORT, an IPv6 address in brackets. ValueError on anything else."""
    host, colon, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text!r} is not ADDRESS:PORT, as 127.0.0.1:7463 or [::1]:7463") from None
    if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise ValueError(f"{text!r} names no port from 0 to 65535: want ADDRESS:PORT, as 127.0.0.1:7463")
    return HostPort(str(address), int(port))


def is_loopback(listen: str) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(read_listen(listen).host).is_loopback
