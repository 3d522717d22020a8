"""Who a peer is: an Ed25519 key, its libp2p peer id, and signatures under a domain. Must not know what is signed.

A peer id is the base58 text of an identity multihash over the protobuf-encoded public key (libp2p peer-ids
specification): bytes 00 24 08 01 12 20, then the 32 raw key bytes. So an id proves a key and holds it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from p2p.errors import UsageError

KEY_BYTES, SEED_BYTES, SIGNATURE_BYTES = 32, 32, 64
"""Bytes of an Ed25519 public key, of the seed of a secret key, and of a signature (RFC 8032)."""

PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""What comes before the key in a peer id: identity multihash of 36 bytes; protobuf field 1 = Ed25519, field 2 = 32 bytes."""

MAX_PEER_ID = 64
"""Characters; an Ed25519 peer id has 52. Base58 is quadratic to decode, so longer text is refused unread."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One peer's secret. `seed` is the 32-byte Ed25519 seed (RFC 8032); it never appears in repr."""

    seed: bytes
    public_key: bytes
    """32 raw bytes"""
    peer_id: str
    """libp2p text form, "12D3KooW..." """

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a seed. ValueError unless `seed` is 32 bytes."""
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a seed is {SEED_BYTES} bytes, not {len(seed)}")
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return cls(bytes(seed), public, peer_id_of(public))

    @classmethod
    def generate(cls) -> Identity:
        return cls.from_seed(os.urandom(SEED_BYTES))

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """The identity in the file at `path` (64 hex digits), made with mode 0600 when there is none.

        UsageError when the file can be read by others than its owner, is not a key, or cannot be read or written.
        """
        path = Path(path)
        try:
            return _create(path)
        except FileExistsError:
            return _load(path)
        except OSError as error:
            raise UsageError(f"cannot write the key file {path}: {error.strerror}") from error

    def sign(self, domain: bytes, body: bytes) -> bytes:
        """64 bytes over `domain`, a zero byte and `body`. A domain holds no zero byte, so none is another's prefix."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(_signed(domain, body))

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(public_key: bytes, domain: bytes, body: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `public_key` (32 raw bytes) over `body` in `domain`. Never raises on bad input."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed(domain, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """The peer id, as base58 text, of a raw public key. ValueError unless `public_key` is 32 bytes."""
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"a public key is {KEY_BYTES} bytes, not {len(public_key)}")
    return base58.b58encode(PEER_ID_PREFIX + public_key).decode()


def public_key_of(peer_id: str) -> bytes:
    """The 32 raw bytes of the public key that a peer id holds. ValueError when `peer_id` is not the canonical text of an Ed25519
    peer id."""
    if not peer_id or len(peer_id) > MAX_PEER_ID or not peer_id.isascii():
        raise ValueError(f"not an Ed25519 peer id: {peer_id[:MAX_PEER_ID]!r}")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise ValueError(f"not an Ed25519 peer id: {peer_id!r}") from error
    key = raw[len(PEER_ID_PREFIX) :]
    # base58 forgives surrounding blanks; two texts for one peer would let a banned peer come back under the other
    if raw[: len(PEER_ID_PREFIX)] != PEER_ID_PREFIX or len(key) != KEY_BYTES or peer_id_of(key) != peer_id:
        raise ValueError(f"not an Ed25519 peer id: {peer_id!r}")
    return key


def _signed(domain: bytes, body: bytes) -> bytes:
    if b"\0" in domain:
        raise ValueError("a signature domain holds no zero byte")
    return domain + b"\0" + body


def _create(path: Path) -> Identity:
    """FileExistsError when there is a file. The key appears whole or not at all: written aside, then linked."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(path)
    identity = Identity.generate()
    aside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(identity.seed.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)
    finally:
        os.unlink(aside)
    return identity


def _load(path: Path) -> Identity:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(2 * SEED_BYTES + 3)
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"the key file {path} is open to others (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
        )
    if len(raw) == SEED_BYTES:
        return Identity.from_seed(raw)
    try:
        return Identity.from_seed(bytes.fromhex(raw.decode("ascii")))
    except ValueError:
        raise UsageError(f"the key file {path} does not hold a key (want {2 * SEED_BYTES} hex digits)") from None
