"""`python -m tests.fuzz.guided --inputs 1000000`: as `tests.fuzz.run`, with inputs chosen by what they reach in our own Python
(atheris, which is libFuzzer). Compiled code, msgspec's decoder with it, is not seen by it. `make nightly` installs
atheris; by hand it is `pip install '.[fuzz]'`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from random import Random
from time import perf_counter

try:
    import atheris
except ImportError:
    raise SystemExit("tests.fuzz.guided needs atheris, which is not installed: pip install '.[fuzz]' (or make nightly)") from None

import p2p.codec  # not instrumented: numba compiles it, and cannot read what atheris makes of it

with atheris.instrument_imports(include=["p2p"]):
    from tests.fuzz.run import Reading, tell
    from tests.fuzz.targets import targets

from tests.fuzz.mutating import mutate

LONGEST = 1 << 16
"""Bytes of an input."""

OURS = 0.5
"""Share of the inputs that `mutating` makes of libFuzzer's choice from its corpus; its own mutations make the others."""


def main() -> None:
    """A first byte chooses the target; the corpus begins with all seeds. libFuzzer never returns: the process ends here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    assert p2p.codec
    chosen, reading, chance, began = targets(), Reading(), Random(args.seed), perf_counter()
    names, done = list(chosen), 0

    def one(data: bytes) -> None:
        nonlocal done
        if done == args.inputs:
            status = tell(reading, began)
            sys.stdout.flush()
            os._exit(status)
        if data:
            done += 1
            name = names[data[0] % len(names)]
            reading.read(name, chosen[name], bytes(data[1:]))

    def damage(data: bytes, most: int, number: int) -> bytes:
        if not data or chance.random() >= OURS:
            return bytes(atheris.Mutate(data, most))
        name = names[data[0] % len(names)]
        return (data[:1] + mutate([data[1:], *chosen[name].seeds], chance))[:most]

    with tempfile.TemporaryDirectory(prefix="fuzz-corpus-") as folder:
        for i, name in enumerate(names):
            for j, data in enumerate(chosen[name].seeds):
                (Path(folder) / f"{i}-{j}").write_bytes(bytes([i]) + data)
        flags = [f"-seed={args.seed + 1}", f"-max_len={LONGEST}", "-rss_limit_mb=0", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *flags, folder], one, custom_mutator=damage, internal_libfuzzer=True)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
