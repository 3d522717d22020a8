"""Sizes, speeds and memory of codecs on model updates, for `shoal bench codec`. The caller chooses updates and codecs.

Speeds are of one thread, in GB of model state per second, the best of REPEATS; for Shoal's codec also those of all cores.
Peak memory is what a codec allocates beyond its inputs and (decoding) the words it fills.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from learner.trainer.device_diff import find_on_device
from netem.bench.codec.entropy import conditional_bytes, memoryless_bytes
from netem.bench.codec.model_updates import ModelUpdate
from netem.bench.codec.other_codecs import OTHER_CODECS, check, missing
from p2p.codec import decode_segment, encode_segment
from p2p.codec.sparse import room
from p2p.errors import ShoalError
from p2p.limits import DEFAULT_SEGMENT

OURS, ANCHOR = "shoal", "shoal-anchor"
REPEATS = 3
"""Runs of which the fastest counts: other programs only ever make a run slower."""


def measure(update: ModelUpdate, codecs: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure `codecs` on one update; returns one case of the benchmark's JSON. `say` gets a line for each codec. ShoalError when
    a codec does not decode to the words that it encoded."""
    changed = update.changed
    rows: list[dict[str, Any]] = []
    case = {
        "name": update.name, "model": update.model, "lr": update.lr, "step": update.step, "values": update.values,
        "changed": changed, "memoryless_bound_bytes": round(memoryless_bytes(update.old, update.new)),
        "conditional_bound_bytes": round(conditional_bytes(update.old, update.new)), "state_bytes": update.new.nbytes,
        "copy_gbps": _copy_rate(update.new), "rows": rows,
    }  # fmt: skip
    for name in codecs:
        if (why := missing(name)) is not None:
            say(f"{update.name}: {why}")
            continue
        row = _ours(update, name == ANCHOR) if name in (OURS, ANCHOR) else _other(update, name)
        row = {"codec": name, "bits_per_changed": 8 * row["bytes"] / changed if changed else None, **row}
        rows.append(row)
        say(f"{update.name}: {name} {row['bytes']:,} bytes, {row['encode_gbps']:.2f} and {row['decode_gbps']:.2f} GB/s")
    return case


def _ours(update: ModelUpdate, anchor: bool) -> dict[str, Any]:
    old, new, out = update.old, update.new, np.empty_like(update.new)
    cuts = list(segments(update))

    def encode(cut: slice) -> bytes:
        return encode_segment(new[cut], None if anchor else old[cut])[0]

    def decode(cut: slice, payload: bytes) -> None:
        decode_segment(payload, None if anchor else old[cut], out[cut])

    payloads = [encode(cut) for cut in cuts]  # the first run compiles the loops
    for cut, payload in zip(cuts, payloads, strict=True):
        decode(cut, payload)
    if not np.array_equal(out, new):
        raise ShoalError(f"{OURS} did not decode to what it encoded ({update.name})")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {
            "bytes": sum(map(len, payloads)),
            "encode_gbps": _rate(new, lambda: [encode(cut) for cut in cuts]),
            "decode_gbps": _rate(new, lambda: list(map(decode, cuts, payloads))),
            "encode_gbps_all": _rate(new, lambda: list(pool.map(encode, cuts))),
            "decode_gbps_all": _rate(new, lambda: list(pool.map(decode, cuts, payloads))),
            "cores": os.cpu_count(), "segment_bytes": DEFAULT_SEGMENT,
            "peak_bytes": max(_peak(lambda: encode(cuts[0])), _peak(lambda: decode(cuts[0], payloads[0]))),
            **({} if anchor else _on_gpu(old, new, cuts)),
        }  # fmt: skip


def _on_gpu(old: np.ndarray, new: np.ndarray, cuts: Sequence[slice]) -> dict[str, float]:
    """How fast a GPU, where there is one, finds what changed."""
    if not torch.cuda.is_available():
        return {}
    both = [torch.from_numpy(words.view(f"<i{words.itemsize}")).cuda() for words in (old, new)]

    def find() -> None:
        for cut in cuts:
            find_on_device(both[1][cut], both[0][cut], room(cut.stop - cut.start))
        torch.cuda.synchronize()

    find()
    return {"extract_gbps_gpu": _rate(new, find)}


def segments(update: ModelUpdate) -> Iterator[slice]:
    size = DEFAULT_SEGMENT // update.new.itemsize
    return (slice(start, min(start + size, update.values)) for start in range(0, update.values, size))


def _other(update: ModelUpdate, name: str) -> dict[str, Any]:
    codec = OTHER_CODECS[name]
    payload = codec.encode(update)
    check(name, payload, update)
    return {
        "bytes": len(payload), "encode_gbps": _rate(update.new, lambda: codec.encode(update)),
        "decode_gbps": _rate(update.new, lambda: codec.decode(payload, update)),
        "peak_bytes": max(_peak(lambda: codec.encode(update)), _peak(lambda: codec.decode(payload, update))),
    }  # fmt: skip


def _copy_rate(words: np.ndarray) -> float:
    out = np.zeros_like(words)
    return _rate(words, lambda: np.copyto(out, words))


def _rate(words: np.ndarray, action: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return words.nbytes / min(took) / 1e9


def _peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
