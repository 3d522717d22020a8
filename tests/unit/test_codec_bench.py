"""The codec benchmark: other codecs give back what they were given, bounds are what theory says, the JSON is complete."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from netem.bench.codec.bench import CASES, CODECS, bench_codec, print_codec
from netem.bench.codec.entropy import conditional_bytes, memoryless_bytes
from netem.bench.codec.measure import measure
from netem.bench.codec.model_updates import ModelUpdate, demo_updates, gaussian_update
from netem.bench.codec.other_codecs import OTHER_CODECS, check, missing
from netem.demo.recipes import RECIPES
from p2p.errors import ShoalError, UsageError


@st.composite
def updates(draw: st.DrawFn) -> ModelUpdate:
    shapes = tuple(draw(st.lists(st.sampled_from([(3,), (7, 11), (70, 300), (1, 70_000), (300, 2)]), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, 2**16, sum(int(np.prod(s)) for s in shapes), dtype=np.uint16)
    new = old.copy()
    hit = rng.random(len(old)) < draw(st.sampled_from([0, 0.0005, 0.02, 0.5, 1]))
    new[hit] += rng.integers(1, 2**16, int(hit.sum()), dtype=np.uint16)
    return ModelUpdate("drawn", "none", None, 1, shapes, old, new)


@given(updates(), st.sampled_from([name for name in OTHER_CODECS if missing(name) is None]))
@settings(max_examples=120, deadline=None)
def test_other_codecs_give_back_what_they_were_given(update: ModelUpdate, name: str) -> None:
    check(name, OTHER_CODECS[name].encode(update), update)


def test_a_codec_that_loses_something_is_refused() -> None:
    update = gaussian_update("g", [(64, 64)], 0.05)
    with pytest.raises(ShoalError, match="pulse did not decode"):
        check("pulse", OTHER_CODECS["pulse"].encode(update), ModelUpdate("h", "", None, 1, update.shapes, update.old, update.old))


def test_bounds_of_changes_that_are_coin_tosses() -> None:
    rng = np.random.default_rng(0)
    old = np.full(200_000, 0x3F80, np.uint16)
    hit = rng.random(len(old)) < 0.25
    new = old + hit.astype(np.uint16)
    entropy = len(old) * (0.25 * np.log2(4) + 0.75 * np.log2(4 / 3)) / 8
    assert memoryless_bytes(old, new) == pytest.approx(entropy, rel=0.01)
    assert conditional_bytes(old, new) == pytest.approx(memoryless_bytes(old, new), rel=1e-6), "one class: nothing to know"


def test_the_class_tells_most_where_steps_are_of_one_size() -> None:
    update = gaussian_update("g", [(512, 512)], 0.01)
    assert update.changed / update.values == pytest.approx(0.01, rel=0.1)
    assert conditional_bytes(update.old, update.new) < 0.7 * memoryless_bytes(update.old, update.new)


def test_a_case_has_what_the_json_promises() -> None:
    update = gaussian_update("g", [(512, 512), (64,)], 0.01)
    case = measure(update, CODECS, lambda line: None)
    assert {"name", "model", "lr", "step", "values", "changed", "memoryless_bound_bytes", "rows"} <= case.keys()
    rows = {row["codec"]: row for row in case["rows"]}
    assert rows.keys() == {name for name in CODECS if missing(name) is None}
    for row in rows.values():
        assert {"codec", "bytes", "bits_per_changed", "encode_gbps", "decode_gbps", "peak_bytes"} <= row.keys()
        assert row["bits_per_changed"] == pytest.approx(8 * row["bytes"] / case["changed"])
    assert rows["shoal"]["bytes"] < 0.75 * case["memoryless_bound_bytes"] < rows["pulse"]["bytes"]
    assert rows["full"]["bytes"] == update.new.nbytes > rows["shoal-anchor"]["bytes"]


def test_a_pair_of_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    old = {"w": torch.randn(64, 64, dtype=torch.bfloat16), "s": torch.randn(9), "only": torch.zeros(1)}
    new = {"w": old["w"].clone(), "s": old["s"] + 1, "more": torch.zeros(2)}
    new["w"][3, 5] += 1
    files = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    for tensors, file in zip((old, new), files, strict=True):
        save_file(tensors, str(file))
    result = bench_codec((), ["shoal", "full"], files, lambda line: None)
    print_codec(result)
    assert [(c["name"], c["values"], c["changed"]) for c in result["cases"]] == [("new-float32", 9, 9), ("new-bfloat16", 4096, 1)]
    assert "new-bfloat16" in capsys.readouterr().err
    save_file({"w": torch.zeros(2)}, str(files[1]))
    with pytest.raises(UsageError, match=r"w is torch.bfloat16 \[64, 64\] in one and torch.float32 \[2\]"):
        bench_codec((), ["shoal"], files, lambda line: None)
    save_file({"x": torch.zeros(2)}, str(files[1]))
    with pytest.raises(UsageError, match="no tensor in common"):
        bench_codec((), ["shoal"], files, lambda line: None)
    with pytest.raises(UsageError, match="missing"):
        bench_codec((), ["shoal"], (files[0], tmp_path / "missing.safetensors"), lambda line: None)


def test_wrong_names_are_said() -> None:
    with pytest.raises(UsageError, match="no codec 'zip'"):
        bench_codec((), ["zip"], None, lambda line: None)
    with pytest.raises(UsageError, match="no case 'x'"):
        bench_codec(["x"], ["shoal"], None, lambda line: None)
    assert "8b-layer" in CASES


@pytest.mark.slow
def test_the_demos_model_really_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES["reverse"].model, "target", 0.0)  # warmed up for a moment only: that takes most of the time
    one, two = demo_updates(3e-4, (1, 2))
    assert np.array_equal(one.new, two.old) and one.step == 1 and two.changed > 0.1 * two.values
