"""Every setting of a task: the table [task], but for its rewards. Must import without torch and without any task.

One value describes a task wherever it is made: in the head, for an evaluation, in a check before the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from learner.section import Section, Seed
from learner.user_code import absolute_name

FILE_ENDS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
"""How the names of files of data end: what is written as a plain string and ends otherwise is a data set's name or folder."""


class DataSource(Section):
    """Where some of the rows come from, as `[[task.data]]` has it."""

    path: str = ""
    """A file: JSONL, JSON, CSV or parquet, by how its name ends."""
    dataset: str = ""
    """A Hugging Face data set, by name or folder, in place of a file."""
    subset: str = ""
    """Configuration of the data set, where it has several."""
    split: str = "train"
    """Split of the data set."""
    revision: str = ""
    """Branch, tag or commit of a data set on the hub. "" is the newest, which may change."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, beside the weights of the other sources."""

    @model_validator(mode="after")
    def _one(self) -> DataSource:
        if bool(self.path) == bool(self.dataset):
            raise ValueError("a source has either a path or a dataset")
        return self


class FewShot(Section):
    """One example of a question and its answer, as `[[task.few_shot]]` has it."""

    prompt: str = Field(min_length=1)
    """What is asked, as the model would read it."""
    answer: str = Field(min_length=1)
    """A right answer."""


def _as_sources(value: Any) -> Any:
    """A single source may be written as its path alone."""
    if not isinstance(value, str):
        return value
    return [] if not value else [{"path" if value.lower().endswith(FILE_ENDS) else "dataset": value}]


class TaskSettings(Section):
    """Where prompts come from."""

    name: str = ""
    """A built-in task (reverse, add, guess_number, guess_digits, data), reasoning_gym:DATASET, verifiers:ENVIRONMENT
    (docs/environments.md), or a class of yours: `file.py:Class` or `module:Class` (docs/own-data.md). "" is data where `data` is
    set, and reverse otherwise."""
    seed: Seed = 0
    """Seed of the task's prompts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task: strings, numbers, booleans, lists and tables of them."""
    allow_unconfined: bool = False
    """Score answers that are run as code even where the operating system cannot keep them from your files."""
    data: Annotated[list[DataSource], BeforeValidator(_as_sources)] = Field(default_factory=list)
    """Rows to make prompts of: a file (JSONL, JSON, CSV, parquet), or a Hugging Face data set by name or folder; several as a
    list of tables with the keys `path` or `dataset`, `subset`, `split`, `revision` and `weight` (docs/own-data.md)."""
    prompt: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    messages: str = ""
    """Column with the prompt as chat messages, in place of `prompt`."""
    template: str = ""
    """Text that the prompt is made of, with {column} for what a column has, in place of `prompt`. A brace itself is {{ or }}."""
    answer: str = "answer"
    """Column with the right answer. Without reward functions an answer is worth 1 when it is the same text, and 0 otherwise."""
    chat: bool = True
    """Prompts of rows are user turns for the tokenizer's chat template. False: the model reads the bare text."""
    system_prompt: str = ""
    """System message before each prompt. A row's own system message stands in its place."""
    few_shot: list[FewShot] = Field(default_factory=list)
    """Examples before each prompt: tables with the keys `prompt` and `answer`."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the tokenizer's chat template, as `{enable_thinking = false}`."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion, beside the end of a turn, whatever tokens they come in. The reward's text ends before the
    string, and the completion with the token that completes it. A node stops by itself at one that is a single token, and at
    any other when the learner has seen it, some tokens later; nobody trains on those."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows that is kept for evaluation. A row's side follows from its prompt alone, so no row changes sides when a
    file grows."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What becomes of rows without a prompt, and of prompts that are longer than the model takes: the run is refused, or they are
    left out and counted."""

    @property
    def kind(self) -> str:
        """The task's name, also where none is given."""
        return self.name or ("data" if self.data else "reverse")

    def rooted(self) -> dict[str, Any]:
        """The values of these settings for a process in another folder: with paths in full."""
        values = {key: value for key, value in self.model_dump().items() if key in TaskSettings.model_fields}
        for source in values["data"]:
            source["path"] = source["path"] and str(Path(source["path"]).absolute())
            if Path(source["dataset"]).is_dir():
                source["dataset"] = source["dataset"] and str(Path(source["dataset"]).absolute())
        return values | {"name": absolute_name(self.name)}
