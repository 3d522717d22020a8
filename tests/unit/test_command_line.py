"""The frame of the command line: what a misspelt word is answered with, and which release says it is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from learner.cli import split_settings
from p2p.errors import ShoalError
from p2p.limits import PROTOCOL_VERSION
from p2p.printable import LOGGED, cleaned, printable
from p2p.release import of_checkout, release
from p2p.verbs import nearest
from tests.support.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    try:
        status = shoal.main(argv)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1, (status, out, err)
    return err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lerner"], ("'lerner'", "did you mean 'learner'?")),
        (["xyzzy"], ("'xyzzy'", "learner, config, status")),
        (["--verison"], ("unknown flag '--verison'", "'--version'", "see: shoal --help")),
        (["status", "--jsn"], ("unknown flag '--jsn'", "'--json'", "see: shoal status --help")),  # before the missing argument
        (["node", "--jion", "shoal1abc"], ("unknown flag '--jion'", "'--join'")),  # its value is not taken for an action
        (["node", "--capacty=8"], ("unknown flag '--capacty'", "'--capacity'")),
        (["node", "drian"], ("'drian'", "'drain'")),
        (["doctor", "--engin-python", "x"], ("'--engine-python'",)),
        (["export", "--outt", "x"], ("unknown flag '--outt'",)),
        (["demo", "--recipe", "sparce"], ("--recipe", "'sparse'")),
        (["demo", "--spt"], ("'--spot'",)),
        (["bench", "brodcast"], ("'broadcast'",)),
        (["bench", "head", "--node", "3"], ("'--nodes'", "see: shoal bench head --help")),
        (["netem", "dwon"], ("'down'",)),
        (["plan", "--helpp"], ("'--help'",)),
    ],
)
def test_a_misspelt_word_is_named_with_the_nearest(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: tuple[str, ...]
) -> None:
    line = complaint(capsys, *argv)
    assert all(word in line for word in words), line


def test_flags_of_another_program_are_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag" not in complaint(capsys, "netem", "exec", "no-such-network", "host", "ls", "--colour")


def test_nearest() -> None:
    assert nearest("--jion", ["--json", "--join"]) == "; did you mean '--join'?"
    assert nearest("stats", ["start", "status"]) == "; did you mean 'status'?"
    assert nearest("colour", ["seed", "model"]) == ""


def test_the_release_is_that_of_pyproject(tmp_path: Path) -> None:
    assert release() == of_checkout(ROOT)
    assert f'version = "{release()}"' in (ROOT / "pyproject.toml").read_text()
    assert of_checkout(tmp_path) == ""
    for text in ("not toml", "[project]\n", '[project]\nname = "other"\nversion = "3"\n'):
        (tmp_path / "pyproject.toml").write_text(text)
        assert of_checkout(tmp_path) == ""


def test_a_checkout_says_its_own_release_whatever_is_installed(tmp_path: Path) -> None:
    """From another folder, with metadata that names another release, as an editable install of last month would."""
    stale = tmp_path / "shoal-0.0.7.dist-info"
    stale.mkdir()
    (stale / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal\nVersion: 0.0.7\n")
    found = subprocess.run([sys.executable, str(ROOT / "shoal.py"), "--version"], capture_output=True, text=True,
                           timeout=PATIENCE_S, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert found.stdout == f"shoal {release()} (protocol {PROTOCOL_VERSION})\n", found.stderr


def test_what_a_stranger_says_is_cleaned_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("\x1b[31mred\n\tname\x00") == "?[31mred name?"
    assert printable("x" * 400) == "x" * 297 + "..." and len(printable("\n" * 10_000)) <= 300
    assert printable("short", 5) == "short" and printable("longer", 5) == "lo..."
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers.clear()
    try:
        assert shoal.main(["status", "/nowhere"]) == 2  # sets logging up
        logging.getLogger("shoal.test").warning("link to %s is up", "\x1b]0;owned\x07" + "y" * 5000)
    finally:
        root.handlers[:] = handlers
    line = capsys.readouterr().err.splitlines()[-1]
    assert "WARNING shoal.test: link to ?]0;owned?yyy" in line and len(line) == LOGGED


def test_a_flag_without_a_value_does_not_swallow_the_next() -> None:
    split = split_settings(["learner", "--external_trainer", "--trainer.lr", "1", "--trainer.steps", "-1", "run.toml"])
    assert split.settings == ["--external_trainer", "--trainer.lr", "1", "--trainer.steps", "-1"]
    assert split.verbs == ["learner", "run.toml"]


def test_a_traceback_in_the_log_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    try:
        logging.getLogger().handlers.clear()
        assert shoal.main(["config", "presets"]) == 0
        try:
            raise ValueError("evil \x1b]0;owned\x07")
        except ValueError:
            logging.getLogger("shoal.test").exception("it failed")
    finally:
        logging.getLogger().handlers[:] = before
    said = capsys.readouterr().err
    assert "ValueError: evil ?]0;owned?" in said and "\x1b" not in said and said.count("\n") > 2


def test_one_rule_for_what_a_terminal_obeys() -> None:
    """What is in U+3000 and U+00A0 is a blank; marks, direction and line breaks of all kinds are not."""
    assert cleaned("a\u3000b\xa0c d") == "a\u3000b\xa0c d"
    assert cleaned("\x9b\u202e\u200b\u2028\ud800\ue000\n\t", "#", "\t") == "#######\t"


@pytest.mark.parametrize(
    "error", [ShoalError("it said \x1b]0;owned\x07\nand\n more"), OSError(5, "it said \x1b]0;owned\x07 and more")]
)
def test_what_ends_a_verb_is_one_clean_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("learner.config_help.presets", fail)
    assert shoal.main(["config", "presets"]) == 1
    assert capsys.readouterr().err == "shoal config: it said ?]0;owned? and more\n"


@pytest.mark.parametrize(("flags", "statuses"), [(["--json"], (141,)), ([], (0, 141))])
def test_nobody_reads_what_is_printed(flags: list[str], statuses: tuple[int, ...]) -> None:
    """`shoal ... | head`: no traceback, and none at the interpreter's end. A verb that had done its work has."""
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run([sys.executable, str(ROOT / "shoal.py"), "config", "presets", *flags], stdout=write,
                           stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)  # fmt: skip
    os.close(write)
    assert found.returncode in statuses and found.stderr == ""


def test_who_stops_reading_half_way_ends_the_verb_quietly() -> None:
    command = f"{sys.executable} {ROOT / 'shoal.py'} config explain rollout | head -c 1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode in (0, 141) and found.stderr == ""


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run([sys.executable, str(ROOT / "shoal.py"), "config", "presets", "--json"], stdout=full,
                               stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)  # fmt: skip
    assert (found.returncode, found.stderr) == (1, "shoal config: stdout: No space left on device\n")
