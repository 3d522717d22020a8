"""What a person is told while the demo makes its model."""

from __future__ import annotations

import io

from rich.console import Console

from netem.demo.waiting import TELL_S, Waiting


def test_without_a_terminal_a_plain_line_now_and_then() -> None:
    page, clock = io.StringIO(), [0.0]
    with Waiting("making tea", console=Console(file=page), now=lambda: clock[0]) as waiting:
        for second in range(1, 31):
            clock[0] = float(second)
            waiting.say(f"making tea: second {second}")
    assert TELL_S == 10.0
    assert page.getvalue().splitlines() == ["making tea", *(f"making tea: second {n}" for n in (10, 20, 30))]


def test_nothing_where_the_result_is_json() -> None:
    page = io.StringIO()
    with Waiting("making tea", shown=False, console=Console(file=page)) as waiting:
        waiting.say("still")
    assert page.getvalue() == ""


def test_in_a_terminal_the_last_line_stays() -> None:
    page = io.StringIO()
    with Waiting("making [tea]", console=Console(file=page, force_terminal=True, width=80)) as waiting:
        waiting.say("making [tea]: done")
    assert "making [tea]: done" in page.getvalue().splitlines()[-1]
