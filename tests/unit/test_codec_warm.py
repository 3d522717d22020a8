"""After `warm()` nothing of the codec is compiled any more: compiling holds up every thread for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from p2p.codec.registry import CODINGS, WARMED
from p2p.layout import WORD
from tests.support.nightly import NIGHTLY

CHILD = """
import json
import sys
from random import Random

import numpy as np
from numba.core.dispatcher import Dispatcher

from p2p.codec import decode_segment, encode_segment, warm
from p2p.codec.registry import CODINGS
from p2p.errors import Refusal
from p2p.layout import WORD
from tests.fuzz.mutating import mutate

modules = [module for name, module in sys.modules.items() if name.startswith("p2p.codec")]
loops = {id(f): f for module in modules for f in vars(module).values() if isinstance(f, Dispatcher)}.values()


def compiled():
    return {f"{f.py_func.__module__}.{f.py_func.__name__}": len(f.signatures) for f in loops}


began, chance, found, read = compiled(), Random(3), [], set()
warm()
warmed = before = compiled()
for size, word in WORD.items():
    base = np.frombuffer(chance.randbytes(9000 * size), word)  # read-only, as a state that is served
    few, most = base.copy(), base + word.type(1)
    few[::50] += word.type(200)
    for new in (few, most):
        for old in (base, base.copy(), None):
            payloads = [encode_segment(new, old)[0]]
            for coding in CODINGS.values():
                if old is not None or not coding.needs_base:
                    made = coding.encode(new, old)
                    payloads += [] if made is None else [bytes([coding.id]) + made.body]
            payloads += [mutate(payloads, chance) for _ in range(20)]
            for payload in payloads:
                for given in (payload, memoryview(payload), bytearray(payload)):
                    try:
                        decode_segment(given, old, np.empty_like(new))
                        read.add((size, payload[0], old is None))
                    except Refusal:
                        pass
    after = compiled()
    found += [f"{size} bytes a word: {name}" for name in after if after[name] > before[name]]
    before = after
print(json.dumps({"began": sum(began.values()), "warm": sum(warmed.values()), "later": found, "read": sorted(read)}))
"""
"""Counts what numba has compiled: by `warm`, and by whole and damaged payloads of each coding and size of word after it."""


def test_nothing_is_compiled_after_warm_whatever_comes(tmp_path: Path) -> None:
    # What is loaded from the cache counts as what is compiled; nightly, nothing is there (half a minute of a core).
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)} if NIGHTLY else {}
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **cache}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["began"] == 0 and told["warm"] > 0 and told["later"] == []
    cases = product(WORD, CODINGS.values(), (False, True))
    wanted = {(size, coding.id, first) for size, coding, first in cases if not (coding.needs_base and first)}
    assert {tuple(one) for one in told["read"]} >= wanted, "each coding was decoded with each size of word"
    assert set(WARMED) == {min(size, 4) for size in WORD}
