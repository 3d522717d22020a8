"""The way to the current version, against trying every way there is."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.protocol.versions import CatalogEntry
from p2p.version import Version
from p2p.weights.catalog import plan_catch_up

PER_INSTALL = 4096


def bits(step: int) -> bytes:
    return bytes([step]) * 32


def anchor(step: int, size: int, mid: int = 0) -> CatalogEntry:
    return CatalogEntry(b"a%d.%d" % (step, mid), "anchor", Version(1, step), None, b"", bits(step), size)


def delta(base: int, step: int, size: int, mid: int = 0) -> CatalogEntry:
    name = b"d%d-%d.%d" % (base, step, mid)
    kind = "delta" if step == base + 1 else "cumulative"
    return CatalogEntry(name, kind, Version(1, step), Version(1, base), bits(base), bits(step), size)


def cost(path) -> int:
    return sum(e.size + PER_INSTALL for e in path)


def leads(path, target: Version, held: int | None) -> bool:
    """Whether installing `path` in order, from `held`, ends at `target`."""
    at = held
    for entry in path:
        if entry.kind != "anchor" and (at is None or entry.base_digest != bits(at)):
            return False
        at = entry.version.step
    return bool(path) and Version(1, at or 0) == target


def brute_force(entries, target: Version, held: int | None) -> int | None:
    costs = [
        cost(path) for n in range(1, min(len(entries), 4) + 1) for path in permutations(entries, n) if leads(path, target, held)
    ]
    return min(costs, default=None)


graphs = st.lists(
    st.builds(anchor, st.integers(1, 5), st.integers(0, 50_000), st.integers(0, 9))
    | st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 50_000), st.integers(0, 9)).map(
        lambda t: delta(t[0], min(t[0] + t[1], 5), t[2], t[3])
    ).filter(lambda e: e.base < e.version),
    max_size=6, unique_by=lambda e: e.mid,
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(graphs, st.integers(1, 5), st.none() | st.integers(1, 5))
def test_the_plan_is_the_cheapest_there_is(entries, target, held) -> None:
    want = Version(1, target)
    found = plan_catch_up(entries, want, None if held is None else Version(1, held), None if held is None else bits(held))
    if held == target:
        assert found == []
        return
    best = brute_force(entries, want, held)
    if best is None:
        assert found is None
    else:
        assert found is not None and leads(found, want, held) and cost(found) == best


def test_a_chain_of_deltas_beats_an_anchor_and_the_other_way_round() -> None:
    chain = [delta(1, 2, 100), delta(2, 3, 100), anchor(3, 50_000)]
    assert plan_catch_up(chain, Version(1, 3), Version(1, 1), bits(1)) == chain[:2]
    chain[2] = anchor(3, 100)
    assert plan_catch_up(chain, Version(1, 3), Version(1, 1), bits(1)) == [chain[2]]


def test_a_delta_is_not_taken_by_the_version_of_its_base_alone() -> None:
    assert plan_catch_up([delta(1, 2, 9)], Version(1, 2), Version(1, 1), bits(77)) is None


def test_the_same_bits_under_another_epoch_need_nothing() -> None:
    entry = CatalogEntry(b"m", "anchor", Version(2, 4), None, b"", bits(4), 1000)
    assert plan_catch_up([entry], Version(2, 4), Version(1, 4), bits(4)) == []
    after = CatalogEntry(b"n", "delta", Version(2, 5), Version(2, 4), bits(4), bits(5), 10)
    assert plan_catch_up([entry, after], Version(2, 5), Version(1, 4), bits(4)) == [after]


def test_descriptors_are_no_way() -> None:
    entry = CatalogEntry(b"m", "descriptor", Version(1, 4), None, b"", bits(4), 10)
    assert plan_catch_up([entry], Version(1, 4), None, None) is None
