"""What `shoal bench networks` prints for people, and a network as a scenario's file. Text only.

Must not know how a network is measured.
"""

from __future__ import annotations

from typing import Any

from netem.bench.networks.bench import TARGETS
from netem.bench.networks.draw import DrawnNetwork

TITLES = {
    "large": "8 MiB and more, later versions", "first": "8 MiB and more, first versions", "small": "below 8 MiB, later versions",
    "small_first": "below 8 MiB, first versions", "copies": "source copies where its uplink is the bound",
    "tenth over second": "tenth version over the second",
}  # fmt: skip
"""What a row is called; those of strata carry their own names."""


def print_networks(result: dict[str, Any], *, each: bool) -> None:
    """`each`: every version of every network as well."""
    if each:
        for one in result["networks"]:
            print(f"{one['name']}: {one['nodes']} nodes, heads {one['heads']:.3f}{'; ' + one['error'] if one['error'] else ''}")
            for v in one["versions"]:
                print(f"  version {v['number']}: T* {v['t_star']:7.2f} s  T {v['t_max']:7.2f} s  r {v['r']:.3f}  source sent "
                      f"{v['copies']:.2f}  came twice {v['duplicates']:.2f}")  # fmt: skip
    print(f"{'':46} {'versions':>8} {'p50':>6} {'p90':>6} {'p99':>6} {'most':>6} {'>1.10':>6}  asked")
    for name, row in result["rows"].items():
        if row["versions"]:
            asked = ", ".join(f"{what} {most:g}" for what, most in TARGETS.get(name, {}).items())
            figures = " ".join(f"{row[p]:6.3f}" for p in ("p50", "p90", "p99", "most"))
            print(f"{TITLES.get(name, name):46} {row['versions']:8} {figures} {row['over_1_10']:6.1%}  {asked}")
    for name, error in result["failed"].items():
        print(f"{name}: {error}")
    if not each:
        print("worst:")
        for worst in result["worst"]:
            print(f"  r {worst['r']:.3f}, version {worst['version']}, {worst['copies']:.2f} copies: {worst['what']}")
            print(f"    {worst['replay']}")


def scenario_text(network: DrawnNetwork) -> str:
    """The network as a scenario that `shoal netem run` reads. Traces of the learner can not be written: a profile has none."""
    lines = [f"# {network.name}, as shoal bench networks draws it", f"payload = {network.payload}",
             f"rounds = {network.versions - 1}", "", "[profile]", f"mtu = {network.profile.mtu}",
             f'congestion = "{network.profile.congestion}"']  # fmt: skip
    for place, host in enumerate(network.profile.hosts):
        access = host.access
        lines += ["", "[[profile.nodes]]", f'name = "{host.name}"'] if place else ["", "[profile.learner]"]
        lines += [f"up_mbit = {access.up / 1e6:g}", f"down_mbit = {access.down / 1e6:g}", f"delay_ms = {1e3 * access.delay:g}",
                  f"jitter_ms = {1e3 * access.jitter:g}", f"loss = {access.loss:g}", f"queue_ms = {1e3 * access.queue:g}"]
        if place and host.trace:
            rows = ", ".join(f"[{s.at:g}, {s.up / 1e6:g}, {s.down / 1e6:g}]" for s in host.trace)
            lines.append(f"trace = [{rows}]")
    return "\n".join(lines) + "\n"
