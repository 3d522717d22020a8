"""What `shoal bench engine` tells people. Pure; must not measure."""

from __future__ import annotations

from typing import Any

ROWS = {
    "offline": "vLLM's offline batch, with log probabilities",
    "offline_plain": "the same without them",
    "spread": "vLLM's offline batch in its default processes, with log probabilities",
    "spread_plain": "the same without them",
    "core": "our adapter alone",
    "process": "through the engine's process",
    "node": "a node: head, links, agent and engine",
}


def _ms(spread: dict[str, float]) -> str:
    return f"{spread['median'] * 1e3:.2f} ms ({spread['low'] * 1e3:.2f} to {spread['high'] * 1e3:.2f})"


def _rate(spread: dict[str, float], digits: int = 0) -> str:
    return f"{spread['median']:,.{digits}f} ({spread['low']:,.{digits}f} to {spread['high']:,.{digits}f})"


def describe(result: dict[str, Any]) -> str:
    """Lines for people: medians, quartiles in brackets."""
    lines = [
        f"{result['cores']} cores, one thread an engine, {result['dtype']}; load average {result['load_before']:.1f} before, "
        f"{result['load_after']:.1f} after; medians (quartiles)"
    ]
    if pause := result.get("pause"):
        lines += _pause(pause)
    for row in result["sizes"]:
        lines += _size(row)
    for row in result["throughput"]:
        lines += _throughput(row)
    lines += [f"{'holds' if held else 'DOES NOT HOLD'}: {what}" for what, held in result["holds"].items()]
    return "\n".join(lines)


def _pause(pause: dict[str, Any]) -> list[str]:
    lines = [f"pauses, {pause['model']} ({pause['parameters'] / 1e6:.2f} M), {pause['sequences']} sequences in flight"]
    if theirs := pause["vllm"]:
        lines += [
            f"  vLLM, nothing updated: pause and resume {_ms(theirs['call_s'])}, 20 ms of it a sleep that ends each pause; "
            f"no token for {_ms(theirs['gap_s'])}",
            f"    the same without that sleep {_ms(theirs['bare_s'])}; no token for {_ms(theirs['bare_gap_s'])}",
        ]
    ours = pause["ours"]
    return [
        *lines,
        f"  ours, every tensor updated: the engine's pause {_ms(ours['pause_s'])}, of it the copy {_ms(ours['apply_s'])} "
        f"({_rate(pause['apply_gbps'], 2)} GB/s)",
        f"    the agent's call {_ms(ours['call_s'])}, the stage before it {_ms(ours['stage_s'])}, the first step after it "
        f"{_ms(ours['first_step_s'])}; no token for {_ms(ours['gap_s'])}",
    ]


def _size(row: dict[str, Any]) -> list[str]:
    lines = [
        f"{row['model']} ({row['parameters'] / 1e6:.1f} M, {row['state_bytes'] / 1e6:,.0f} MB), {row['sequences']} sequences, "
        f"step {_ms(row['step_s'])}"
    ]
    for share in ("all", "tenth"):
        c = row[share]
        lines.append(
            f"  {'every tensor' if share == 'all' else 'a tenth of them'} ({c['bytes']['median'] / 1e6:,.1f} MB): pause "
            f"{_ms(c['pause_s'])}, copy {_ms(c['apply_s'])} = {_rate(c['apply_gbps'], 2)} GB/s, first step "
            f"{_ms(c['first_step_s'])}, stage {_ms(c['stage_s'])}"
        )
    return lines


def _throughput(row: dict[str, Any]) -> list[str]:
    lines = [
        f"tokens/s, {row['model']} ({row['parameters'] / 1e6:.1f} M), {row['prompts']} prompts of {row['length']} tokens, "
        f"{row['new']} new each, {row['running']} at once"
    ]
    lines += [f"  {ROWS[name]}: {_rate(row['tokens_per_s'][name])}" for name in ROWS if name in row["tokens_per_s"]]
    used = ", ".join(f"{name} {use['median']:.2f}" for name, use in row["cpu"].items())
    lines.append(f"  cores that the node's turn kept busy: {used}")
    if share := row["node_share"]:
        lines.append(
            f"  a node makes {share['median']:.1%} ({share['low']:.1%} to {share['high']:.1%}) of vLLM's better layout, "
            "with log probabilities, turn by turn"
        )
    return lines
