"""NAT in profiles: what a file says of it, what becomes of addresses and rates, the rules of a router."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from netem.contest.tuning import player_options
from netem.emulation.homes import filter_of, firewall_of, plan_of, rules_of
from netem.networks.bound import profile_bound
from netem.networks.profile import LEARNER, build_profile
from p2p.errors import UsageError

BASE = """
[learner]
up_mbit = 20
down_mbit = 100
nat = "cone"
forward = [4001]

[[nodes]]
name = "flat"
count = 2
up_mbit = 20
down_mbit = 100
nat = "cone"
home = "flat"

[[nodes]]
name = "wall"
up_mbit = 20
down_mbit = 100
nat = "firewall"

[[nodes]]
name = "open"
up_mbit = 20
down_mbit = 100
"""


def build(text: str) -> Any:
    return build_profile(tomllib.loads(text), "test.toml")


def test_hosts_of_a_home_share_address_and_link() -> None:
    profile = build(BASE)
    addresses, beside, homes = plan_of(profile)
    assert not beside and addresses["flat-1"] == addresses["flat-2"] and len(set(addresses.values())) == 4
    assert [(h.name, h.hosts) for h in homes] == [(LEARNER, (LEARNER,)), ("flat", ("flat-1", "flat-2"))]
    assert (homes[1].inner("flat-1"), homes[1].inner("flat-2")) == ("192.168.1.2", "192.168.1.3")
    assert profile.gateway(profile.host("flat-2")) is profile.host("flat-1")
    assert profile.delay(profile.host("flat-1"), profile.host("flat-2")) == 0.0
    # Three receivers, not four: the flat's second has it from the first.
    assert profile_bound(profile, 10**6) == pytest.approx(8e6 / 20e6)
    wide = build(BASE.replace("[learner]\nup_mbit = 20", "[learner]\nup_mbit = 90"))
    assert profile_bound(wide, 10**6) == pytest.approx(3 * 8e6 / 150e6)


IPV6 = 'ipv6 = "only"\n' + BASE.replace('nat = "cone"\nhome = "flat"\n', "").replace('nat = "cone"', 'nat = "firewall"')
"""Without translation: the flat's hosts are open, the learner is behind a firewall that lets one port in."""


def test_a_network_of_ipv6() -> None:
    profile = build(IPV6)
    addresses, beside, homes = plan_of(profile)
    assert profile.ipv6 == "only" and profile.natted and not homes and not beside
    assert list(addresses.values()) == [f"2a77:7777::{number}" for number in range(1, 6)]
    assert "tcp dport 4001 accept" in firewall_of((4001,)) and "dport" not in firewall_of(())
    assert build(BASE).ipv6 == "none"
    also = plan_of(build('ipv6 = "also"' + BASE))
    assert also.ipv6["flat-2"] == "2a77:7777::3" and also.addresses["flat-2"] == "11.77.0.2" and len(also.homes) == 2
    assert "ip6 daddr 2a77:7777::1 tcp dport 4001 accept" in filter_of({also.ipv6[LEARNER]: (4001,)}, wan="wan")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "open"', 'name = "open"\nnat = "cone"', "open: NAT of IPv6 is not emulated"),
        ('ipv6 = "only"', 'ipv6 = "only"\nmtu = 1279', "mtu: 1279, but IPv6 needs 1280"),
    ],
)
def test_what_a_network_of_ipv6_has_not(old: str, new: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build(IPV6.replace(old, new, 1))


@pytest.mark.parametrize("peer", ["shardcast", "libtorrent"])
def test_peers_that_are_played_over_ipv4_only_say_so(peer: str) -> None:
    assert player_options("shoal", build(IPV6), 1) is not None
    with pytest.raises(UsageError, match=f"{peer} is played over IPv4 only"):
        player_options(peer, build(IPV6), 1)


def test_rules_say_ports_and_the_mapping() -> None:
    plain = rules_of({4001: "192.168.1.2"}, wan="wan", public="11.77.0.1", random_ports=False, hairpin=False)
    assert "ip daddr 11.77.0.1 tcp dport 4001 dnat to 192.168.1.2:4001" in plain and "fully-random" not in plain
    assert 'iifname != "wan" accept\n  ip daddr' in plain, "not for those inside"
    other = rules_of({4001: "192.168.1.2"}, wan="wan", public="11.77.0.1", random_ports=True, hairpin=True)
    assert "masquerade random,fully-random" in other and "ct status dnat masquerade" in other


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('nat = "cone"\nforward', "forward", "say more of a NAT"),
        ('nat = "cone"\nforward', 'nat = "symmetric"\nforward', "forwards no port"),
        ("forward = [4001]", "forward = [0]", "from 1 to 65535"),
        ('nat = "cone"\nforward', 'nat = "firewall"\nupnp = true\nforward', "neither hairpins nor maps ports"),
        ('nat = "firewall"', 'nat = "firewall"\nhome = "flat"', "is alone"),
        ('nat = "firewall"', 'nat = "symmetric"\nhome = "flat"', "must be the same"),
        ('nat = "firewall"', 'nat = "full"', "nat"),
        ('home = "flat"', 'home = "flat"\nforward = [4001]', "leads to one of them"),
        ('nat = "firewall"', 'nat = "firewall"\nsite = "s"\n[sites.s]\npreset = "lan"', "site"),
    ],
)
def test_what_a_file_may_not_say(old: str, new: str, why: str) -> None:
    assert old in BASE
    with pytest.raises(UsageError, match=why):
        build(BASE.replace(old, new, 1))
