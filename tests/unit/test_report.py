"""learner/status/report.py: one page that needs nothing else, of any run, finished or not."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from learner.config import build_config, resolved
from learner.journal.journal import Journal
from learner.status.facts import Fact
from learner.status.outcome import report_of
from learner.status.report import SAMPLES, some_samples, write_report
from learner.status.run_state import RunState
from p2p.errors import UsageError
from tests.unit.test_run_state import line
from tests.unit.test_terminal import a_run


class Headings(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open = tag in ("h2", "h3")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found.append(data)
            self._open = False


def page_of(folder: Path, state: RunState, steps: int = 50, **more: object) -> str:
    lines = [line(s, cost__total_usd=s / 1000) | {"off_policy/mean": 0.9, "time/train": 1.0} for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return write_report(folder, state, **more).read_text()  # type: ignore[arg-type]


def test_the_curve_is_first_then_nodes_cost_and_faults(tmp_path: Path) -> None:
    page = page_of(tmp_path, a_run(12, finished=True, reports=["peer x: chunk 3 has another digest"]))
    headings = Headings()
    headings.feed(page)
    order = [headings.found.index(name) for name in ("Learning", "Nodes", "Cost", "Faults", "How it ran", "Samples", "Numbers")]
    assert order == sorted(order) and order[0] == 0
    assert page.index("<svg") < page.index("class=nodes") and "chunk 3 has another digest" in page
    cells = re.findall(r'<td class="head"[^>]*>([^<]*)<', page)
    assert cells == [f"node-{i}" for i in range(1, 13)]
    assert ">warm<" in page and ">alive<" not in page and "…000003" in page and ">20 ms<" in page
    assert "nobody knows yet" not in page


def test_after_a_resume_the_page_says_of_which_life_the_seconds_are(tmp_path: Path) -> None:
    page = page_of(tmp_path, a_run(epoch=2, finished=True))
    assert "finished: 20 of 40 steps, 1 min 01 s in this life (epoch 2)" in page
    assert "1.20, 0 published in this life (epoch 2)" in page and "1 seen in this life (epoch 2), bound 2" in page
    assert "between nodes in this life (epoch 2)" in page and "this life" not in page_of(tmp_path, a_run(finished=True))


def test_it_needs_nothing_else_and_follows_the_readers_ground(tmp_path: Path) -> None:
    page = page_of(tmp_path, a_run())
    assert not re.search(r"(src|href)=[\"']?https?:|@import|<script", page)
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert not re.search(r"(stroke|fill): #(?!none)", page), "a drawing has a colour that is not the page's"


def test_strangers_texts_are_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    state = RunState.of({"run": evil, "nodes": [{"name": evil, "reason": evil}], "reports": [evil], "events": [{"text": evil}]})
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": evil, "completion": evil}) + "\n")
    page = page_of(tmp_path, state, extra=[Fact("x", evil)], faults=[evil], happened=[evil])
    assert "<script" not in page and "\x1b" not in page and page.count("&lt;script") >= 9


def test_a_run_of_which_nothing_is_known_has_a_page(tmp_path: Path) -> None:
    page = write_report(tmp_path, RunState()).read_text()
    assert "Numbers" in page and "<svg" not in page and "None: no refusal" in page


def test_a_long_runs_page_stays_small(tmp_path: Path) -> None:
    assert len(page_of(tmp_path, a_run(300), steps=5000)) < 2_000_000


def test_samples_are_of_the_beginning_and_of_the_end(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert some_samples(tmp_path) == []
    path.write_text("".join(json.dumps({"step": s, "completion": f"c{s}"}) + "\n" for s in range(1, 100)) + '{"step": 1')
    assert [s.step for s in some_samples(tmp_path)] == [*range(1, SAMPLES + 1), *range(100 - SAMPLES, 100)]
    path.rename(tmp_path / "samples.1.jsonl")
    path.write_text('{"step": 100, "completion": "c"}\n')
    assert [s.step for s in some_samples(tmp_path)] == [*range(1, SAMPLES + 1), *range(101 - SAMPLES, 101)], "of both files"


def test_a_run_that_was_left_has_a_report_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        report_of(tmp_path)
    (tmp_path / "run.json").write_text('{"run": "00aa"}')
    with pytest.raises(UsageError, match="not running"):
        report_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2)) + "\n")
    page = report_of(tmp_path).read_text()
    assert "Shoal run 00aa" in page and "not finished: 2 steps" in page and "<svg" in page
    assert "0 of 0" not in page and "bound" not in page and "None:" not in page


def test_the_report_of_a_run_that_was_left_says_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run": "00aa"}')
    config = build_config({"model": "m", "run_dir": str(tmp_path), "task": {"name": "reverse"}, "trainer": {"steps": 40},
                           "rollout": {"max_staleness": 3}}, "test")  # fmt: skip
    (tmp_path / "config.toml").write_text(resolved(config))
    lines = [{"step": 0, "epoch": 1, "eval/exact/mean": 0.25}, *(line(s, cost__total_usd=s / 2) for s in range(1, 8))]
    again = [line(6, epoch=2, off_policy__max=2.0, cost__total_usd=4.25)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*lines, *again]))
    page = report_of(tmp_path).read_text()
    for said in ("not finished: 6 of 40 steps", "00aa (epoch 2)", ">left<", "2 seen, bound 3", "$4.25", "0.25 at step 0"):
        assert said in page, said
    for said in ("running", "0 s<", "now $", "trained on of", "None:", "0 published", "no node", "weights sent", "one version"):
        assert said not in page, said


def test_a_learner_that_only_did_not_answer_has_no_report_of_a_run_that_was_left(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run": "00aa"}')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1)) + "\n")
    with Journal.open(tmp_path / "journal.sqlite", "00aa"), pytest.raises(UsageError, match="not running"):
        report_of(tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert report_of(tmp_path).exists()
