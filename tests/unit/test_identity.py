"""Identities: the file, the peer id, the signature."""

from __future__ import annotations

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from p2p.errors import UsageError
from p2p.identity import Identity, peer_id_of, public_key_of, verify


@given(st.binary(min_size=32, max_size=32))
def test_peer_id_is_what_libp2p_computes(seed: bytes) -> None:
    identity, theirs = Identity.from_seed(seed), create_new_key_pair(seed).public_key
    assert identity.public_key == theirs.to_bytes()
    assert identity.peer_id == str(ID.from_pubkey(theirs))
    assert identity.peer_id.startswith("12D3KooW")
    assert public_key_of(identity.peer_id) == identity.public_key


RSA_PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize("text", ["", "12D3KooW", RSA_PEER, "0OIl", "x" * 9999, "é"])
def test_what_is_no_ed25519_peer_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an Ed25519 peer id"):
        public_key_of(text)


def test_one_peer_has_one_text() -> None:
    peer = Identity.generate().peer_id
    for other in (peer + " ", " " + peer, peer + "\n", "1" + peer):
        with pytest.raises(ValueError, match="not an Ed25519"):
            public_key_of(other)
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id_of(b"short")


def test_signatures_hold_for_their_key_domain_and_body_only() -> None:
    mine, other = Identity.generate(), Identity.generate()
    signature = mine.sign(b"seal", b"body")
    assert len(signature) == 64
    assert verify(mine.public_key, b"seal", b"body", signature)
    assert not verify(other.public_key, b"seal", b"body", signature)
    assert not verify(mine.public_key, b"sea", b"lbody", signature)
    assert not verify(mine.public_key, b"seal", b"body!", signature)
    assert not verify(mine.public_key, b"seal", b"body", signature[:-1])
    assert not verify(b"", b"seal", b"body", signature)
    with pytest.raises(ValueError, match="zero byte"):
        mine.sign(b"a\0b", b"")


def test_the_file_is_made_once_private_and_read_again(tmp_path) -> None:
    path = tmp_path / "key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert Identity.load_or_create(path) == made
    assert os.listdir(tmp_path) == ["key"]
    assert made.seed.hex() not in repr(made)


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        (b"", 0o600),
        (b"zz" * 32, 0o600),
        (b"ab" * 31, 0o600),
        (b"ab" * 40, 0o600),
        (b"ab" * 32, 0o640),
        (b"ab" * 32, 0o604),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, content: bytes, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(UsageError) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_no_directory_is_one_line(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot write the key file"):
        Identity.load_or_create(tmp_path / "none" / "key")
