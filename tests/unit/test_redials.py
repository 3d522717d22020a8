"""Failed attempts to reach the learner: told once, then counted."""

from __future__ import annotations

from p2p.channel.listening import short_address
from p2p.membership.redials import TELL_S, Redials
from p2p.quantities import human_bytes, human_seconds


def test_the_first_failure_is_told_and_a_night_costs_a_dozen_lines() -> None:
    redials, said = Redials(), []
    for second in range(0, 8 * 3600, 8):
        if line := redials.failed(float(second), "1.2.3.4:5: Connection refused"):
            said.append(line)
    assert said[0] == "1.2.3.4:5: Connection refused; trying again until it works"
    assert said[1] == "9 attempts in 1 min 04 s; the last one: 1.2.3.4:5: Connection refused"
    assert 8 <= len(said) <= 15
    assert redials.reached(8 * 3600.0) == " after 3600 failed attempts in 8 h 00 min"


def test_whoever_was_reached_is_told_of_again() -> None:
    redials = Redials()
    assert redials.reached(0.0) == ""
    assert redials.failed(1.0, "no answer").startswith("no answer;")
    assert redials.failed(2.0, "no answer") == ""
    assert redials.reached(6.0) == " after 2 failed attempts in 5 s"
    assert redials.reached(7.0) == ""
    assert redials.failed(8.0, "gone").startswith("gone;")
    assert redials.failed(8.0 + TELL_S[0], "gone").startswith("2 attempts in 1 min 00 s")


def test_durations_and_addresses_for_people() -> None:
    assert [human_seconds(s) for s in (0.4, 59.9, 65, 7380)] == ["0 s", "59 s", "1 min 05 s", "2 h 03 min"]
    assert [human_bytes(n) for n in (3, 605_246, 7.5 * 2**30, 2**40)] == ["3 B", "591 KiB", "7.5 GiB", "1 TiB"]
    assert short_address("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW") == "192.0.2.1:4001"
    assert short_address("/ip6/2001:db8::1/tcp/4001") == "[2001:db8::1]:4001"
    assert short_address("/dns/example.org/tcp/4001/p2p/12D3KooW") == "example.org:4001"
    assert short_address("/memory/x") == "/memory/x"
    assert "\x1b" not in short_address("/ip4/\x1b[31m/tcp/1") and len(short_address("/x" * 500)) == 100
