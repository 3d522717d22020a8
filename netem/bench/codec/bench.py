"""`shoal bench codec`: the updates and codecs that it knows, one run of it, and the table that it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from netem.bench.codec.measure import ANCHOR, OURS, measure
from netem.bench.codec.model_updates import ModelUpdate, demo_updates, gaussian_update, minilm_updates, pair_update
from netem.bench.codec.other_codecs import OTHER_CODECS, missing
from p2p.errors import UsageError

CODECS = (OURS, *OTHER_CODECS, ANCHOR)

LAYER_8B = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
"""One layer of an 8B model (Llama 3's shapes): 218 M values."""

CASES: dict[str, Callable[[], Iterator[ModelUpdate]]] = {
    "minilm-fp32-1e-06": lambda: minilm_updates(1e-6, (8, 16, 32)),
    "minilm-fp32-3e-06": lambda: minilm_updates(3e-6, (8, 16, 32)),
    "minilm-fp32-1e-05": lambda: minilm_updates(1e-5, (8, 32)),
    "minilm-bf16-1e-06": lambda: minilm_updates(1e-6, (2, 8), on_grid=True),
    "minilm-bf16-3e-06": lambda: minilm_updates(3e-6, (2, 8), on_grid=True),
    "demo": lambda: demo_updates(3e-4, (1, 8)),
    "8b-layer": lambda: iter([gaussian_update("8b-layer", LAYER_8B, 0.01)]),
}


def bench_codec(
    cases: Sequence[str], codecs: Sequence[str], pair: tuple[Path, Path] | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the benchmark; returns what `shoal bench codec --json` prints. `cases`: names of CASES, none for all; `pair`: two
    safetensors files in their place. UsageError for unknown names and checkpoints that cannot be compared."""
    for name in codecs:
        if name not in CODECS:
            raise UsageError(f"--codecs: no codec {name!r}: {', '.join(CODECS)}")
    for name in cases:
        if name not in CASES:
            raise UsageError(f"--cases: no case {name!r}: {', '.join(CASES)}")
    makers = [lambda: pair_update(*pair)] if pair else [CASES[name] for name in cases or CASES]
    out = [measure(update, codecs, say) for make in makers for update in make()]
    skipped = {name: why for name in codecs if (why := missing(name)) is not None}
    return {"ok": True, "cases": out, "skipped": skipped}


def print_codec(result: dict[str, Any]) -> None:
    """Print a table for each case on stderr."""
    console = Console(stderr=True)
    for case in result["cases"]:
        bound, changed = case["memoryless_bound_bytes"], case["changed"]
        title = (
            f"{case['name']}: {case['values'] / 1e6:.1f} M values, {100 * changed / max(1, case['values']):.2f} % changed, "
            f"memoryless bound {bound:,} bytes, given the class "
            f"{case['conditional_bound_bytes']:,}; a copy {case['copy_gbps']:.1f} GB/s"
        )
        table = Table(title=title, title_justify="left")
        for name in ("codec", "bytes", "of the bound", "bits a change", "encode GB/s", "decode GB/s", "peak MiB"):
            table.add_column(name, justify="left" if name == "codec" else "right")
        for row in case["rows"]:
            of = f"{row['bytes'] / bound:.3f}" if bound else "-"
            each = f"{row['bits_per_changed']:.2f}" if row["bits_per_changed"] is not None else "-"
            table.add_row(
                row["codec"], f"{row['bytes']:,}", of, each, f"{row['encode_gbps']:.2f}", f"{row['decode_gbps']:.2f}",
                f"{row['peak_bytes'] / 2**20:.1f}",
            )  # fmt: skip
        console.print(table)
    for why in result["skipped"].values():
        console.print(f"skipped: {why}", markup=False, highlight=False)
