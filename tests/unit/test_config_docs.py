"""docs/configuration.md is what the settings say of themselves, and every setting says something."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.config_docs import Setting, markdown, sections

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

SETTINGS = [one for section in sections() for one in section.settings]


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "make it anew: shoal config docs > docs/configuration.md"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_is_described_in_sentences(setting: Setting) -> None:
    assert setting.what[:1].isupper() or setting.what.startswith('"'), setting
    assert setting.what.endswith("."), setting


def test_every_section_is_described() -> None:
    assert all(section.what.endswith(".") for section in sections())


@pytest.mark.parametrize(
    ("key", "type", "default"),
    [
        ("run_dir", "string", "required"),
        ("seed", "integer of 64 bits", "0"),
        ("rollout.max_staleness", "integer ≥ 0, ≤ 64", "2"),
        ("rollout.on_update", '`"continue"`, `"finish"`', '"continue"'),
        ("activation.prices", "table of lists of numbers", "{}"),
        ("trainer.betas", "list of 2 numbers ≥ 0, < 1", "[0.9, 0.95]"),
        ("task.options", "table", "{}"),
        ("task.data", "string, or list of tables", "[]"),
        ("eval.task", "table", "none"),
        ("eval.name", "string", "required"),
    ],
)
def test_types_and_defaults_are_said_in_words(key: str, type: str, default: str) -> None:
    found = next(one for one in SETTINGS if one.key == key)
    assert (found.type, found.default) == (type, default)
