"""The sums over all manifests do not depend on how many of them are still kept one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.publish.published import Published, PublishedVersions
from p2p.version import Version

manifests = st.lists(
    st.tuples(st.booleans(), st.integers(0, 999), st.integers(0, 3000), st.integers(0, 500), st.booleans()), max_size=60
)


@given(manifests, st.integers(1, 8))
def test_sums_are_the_same_however_little_is_kept(made, kept) -> None:
    short, whole = PublishedVersions(lambda p: True, recent=kept), PublishedVersions(lambda p: False)
    for step, (anchor, size, sent, peers, sealed) in enumerate(made):
        for published in (short, whole):
            p = Published(bytes([step]), "anchor" if anchor else "delta", Version(1, step), None, size, size // 2, size)
            published.add(p)
            p.sent, p.peer_bytes = sent, peers
            if sealed:
                p.sealed = 1.0
                published.seal(p)
    assert len(short.recent) <= kept and short.begun == len(made)
    mine, all_kept = short.summary(), whole.summary()
    assert abs(mine.pop("learner_egress_ratio") - all_kept.pop("learner_egress_ratio")) < 1e-9
    assert mine == all_kept
    sealed_deltas = [size for anchor, size, _, _, sealed in made if sealed and not anchor]
    assert mine["delta_bytes_mean"] == (sum(sealed_deltas) / len(sealed_deltas) if sealed_deltas else 0)
    assert mine["versions_published"] == sum(sealed for *_, sealed in made)
    assert mine["learner_egress_bytes"] == sum(sent for _, _, sent, _, _ in made)


def test_a_version_is_found_by_what_it_was_published_with() -> None:
    published = PublishedVersions(lambda p: True)
    for kind, size in (("delta", 10), ("cumulative", 40), ("anchor", 900)):
        made = Published(kind.encode(), kind, Version(1, 7), None, size, 1, 2, sealed=1.0)
        published.add(made)
        published.seal(made)
    assert published.find(Version(1, 7)) is published.recent[0]
    assert published.summary()["delta_bytes_mean"] == 10 and published.summary()["anchor_bytes"] == 900


def test_what_can_still_change_is_kept() -> None:
    open_mids = {b"a"}
    published = PublishedVersions(lambda p: p.mid not in open_mids, recent=2)
    for name in b"abcde":
        published.add(Published(bytes([name]), "delta", Version(1, name), None))
    assert [p.mid for p in published.recent] == [b"a", b"b", b"c", b"d", b"e"]
    open_mids.clear()
    published.add(Published(b"f", "delta", Version(1, 200), None))
    assert [p.mid for p in published.recent] == [b"e", b"f"]
    assert published.find(Version(1, 200)) is published.recent[1] and published.find(Version(1, ord("a"))) is None
