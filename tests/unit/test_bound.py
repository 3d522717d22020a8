"""The fluid bound: the published examples, and a schedule within all capacities that reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.networks.bound import best_rate, fluid_bound, profile_bound
from netem.networks.profile import build_profile

rates = st.floats(1e5, 1e9)
swarms = st.integers(1, 20).flatmap(
    lambda n: st.tuples(
        rates,
        st.lists(st.one_of(st.just(0.0), rates), min_size=n, max_size=n),
        st.lists(rates, min_size=n, max_size=n),
    )
)


def test_worked_examples() -> None:
    """8 nodes, 108 MB, 500 Mbit/s at the source: 5.3 s with 100 Mbit/s uplinks, 10.5 s with 20; unicast takes 13.8."""
    bits = 8 * 108e6
    assert fluid_bound(bits, 500e6, [100e6] * 8, [1e9] * 8) == pytest.approx(5.317, abs=1e-3)
    assert fluid_bound(bits, 500e6, [20e6] * 8, [1e9] * 8) == pytest.approx(10.473, abs=1e-3)
    assert fluid_bound(bits, 500e6, [0.0] * 8, [1e9] * 8) == pytest.approx(13.824)
    assert fluid_bound(bits, 100e6, [1e9] * 8, [1e9] * 8) == pytest.approx(8.64)  # the source's uplink
    assert fluid_bound(bits, 500e6, [500e6] * 8, [50e6] + [1e9] * 7) == pytest.approx(17.28)  # the slowest downlink


def test_of_a_profile() -> None:
    values = {
        "learner": {"up_mbit": 40.0, "down_mbit": 50.0},
        "nodes": [{"count": 8, "up_mbit": 20.0, "down_mbit": 50.0}],
    }
    assert profile_bound(build_profile(values, "t"), 32 << 20) == pytest.approx(8 * 8 * (32 << 20) / 200e6)


def test_a_sites_hosts_are_one_to_the_wan() -> None:
    link, lan = {"up_mbit": 8.0, "down_mbit": 50.0}, {"up_mbit": 200.0, "down_mbit": 200.0}
    sites = [{"name": site, "count": 3, "site": site, **link} for site in ("east", "west")]
    values = {"sites": {"east": lan, "west": lan}, "learner": {"up_mbit": 20.0, "down_mbit": 50.0}, "nodes": sites}
    bits = 8 * (16 << 20)

    def bound(**learner: float | str) -> float:
        return profile_bound(build_profile({**values, "learner": {**values["learner"], **learner}}, "t"), 16 << 20)  # type: ignore[dict-item]

    assert bound() == pytest.approx(bits / 20e6), "6 x M / (20 + 6 x 8) without sites"
    assert bound(up_mbit=100.0) == pytest.approx(bits / 74e6), "2 M / (100 + 48)"
    assert bound(up_mbit=1000.0) == pytest.approx(bits / 150e6), "three downlinks together"
    assert bound(site="east") == pytest.approx(bits / 44e6), "three of them and the learner send to the other site"
    values["nodes"] = sites[:1]
    assert bound(site="east") == pytest.approx(bits / 250e6), "nothing crosses the WAN"


class Streams(NamedTuple):
    """A fluid schedule that reaches the bound: rates in bit/s."""

    repeated: tuple[float, ...]
    """what the source sends to receiver i, and i on to every other receiver"""
    direct: float
    """what the source sends to every receiver itself"""


def fluid_streams(source_up: float, uplinks: Sequence[float], downlinks: Sequence[float]) -> Streams:
    """Sub-streams whose sum is `best_rate`. With one receiver everything is direct."""
    n, rate = len(uplinks), best_rate(source_up, uplinks, downlinks)
    if n == 1:
        return Streams((0.0,), rate)
    # Receivers can repeat sum(u)/(n-1) among them; beyond that the source must send n copies.
    repeatable = min(rate, sum(uplinks) / (n - 1))
    total = sum(uplinks)
    repeated = tuple(repeatable * u / total if total else 0.0 for u in uplinks)
    return Streams(repeated, rate - repeatable)


@given(swarms)
def test_a_schedule_within_all_capacities_reaches_the_bound(swarm) -> None:
    source, up, down = swarm
    rate, n = best_rate(source, up, down), len(up)
    repeated, direct = fluid_streams(source, up, down)
    slack = 1 + 1e-9
    assert sum(repeated) + direct == pytest.approx(rate)
    assert min(*repeated, direct) >= -1e-6
    assert sum(repeated) + n * direct <= source * slack + 1e-3
    for i in range(n):
        assert (n - 1) * repeated[i] <= up[i] * slack + 1e-3
        assert rate <= down[i] * slack


@given(swarms)
def test_no_receiver_makes_it_slower_by_having_more_uplink(swarm) -> None:
    source, up, down = swarm
    assert best_rate(source, [u * 2 for u in up], down) >= best_rate(source, up, down)


@pytest.mark.parametrize("wrong", [((), ()), ((1.0,), (1.0, 2.0)), ((1.0,), (0.0,)), ((-1.0,), (1.0,))])
def test_what_never_ends(wrong) -> None:
    with pytest.raises(ValueError):
        fluid_bound(1.0, 1.0, *wrong)
