"""DataRows of data by number: JSONL, JSON, CSV, and what the package `datasets` reads. Must not know what a row means.

A JSONL file is read row by row by the place where a row begins; JSON and CSV are kept in memory; parquet and data sets lie
in files that `datasets` maps into memory.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from p2p.errors import UsageError

Row = Mapping[str, Any]
"""Columns by name."""

FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
"""How names of files of data end; what ends otherwise is a data set's name or folder."""

READ_BYTES = 1 << 16
"""Bytes read at a time of a row: most rows are shorter."""

MOST_BYTES = 64 << 20
"""Bytes of one row: what is longer is no row but a file without line ends."""

NO_DATASETS = "needs the package datasets, which is not installed: pip install '.[data]' from Shoal's checkout"
"""What is said where a source needs what is not there."""


class ScannedRow(NamedTuple):
    """One row as a file has it."""

    at: int
    """what `read` finds it by"""
    number: int
    """its number for a person, from 1: of JSONL and CSV the line"""
    row: Row | None
    """None: it is no row"""
    problem: str = ""
    """why it is none"""


class DataRows(Protocol):
    """The rows of one source."""

    title: str
    """for messages"""

    def scan(self) -> Iterator[ScannedRow]:
        """All of them, in order, empty lines left out."""
        ...

    def read(self, at: int) -> Row:
        """One row again; quick. UsageError when it is not there any more."""
        ...


class DatasetName(NamedTuple):
    """A data set as the package `datasets` finds it."""

    name: str
    """on the hub, or a folder"""
    subset: str
    split: str
    revision: str


def open_file(path: str) -> DataRows:
    """The rows of a file, by how its name ends. UsageError when it cannot be read."""
    file = Path(path)
    kind = file.suffix.lower()
    if kind not in FILES:
        raise UsageError(f"task.data: {path}: a file of data ends in {', '.join(FILES)}")
    if not file.is_file():
        raise UsageError(f"task.data: no such file: {path}")
    try:
        if kind == ".parquet":
            return _Dataset(path, _parquet(path))
        return JsonLines(path) if kind in (".jsonl", ".ndjson") else _Kept(path, _csv(file) if kind == ".csv" else _json(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"task.data: {path} cannot be read: {error}") from None


def open_dataset(wanted: DatasetName) -> DataRows:
    """The rows of a data set. UsageError when it cannot be had."""
    datasets = _package(f"task.data: {wanted.name}")
    title = f"{wanted.name} ({wanted.split})"
    folder = Path(wanted.name)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            found = datasets.load_from_disk(wanted.name)
            if isinstance(found, datasets.DatasetDict):
                found = found[wanted.split]
        else:
            found = datasets.load_dataset(
                wanted.name, wanted.subset or None, split=wanted.split, revision=wanted.revision or None
            )
    except Exception as error:  # the hub, a network, a folder's files: it may be anything
        what = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"task.data: {title} cannot be loaded: {type(error).__name__}: {what:.300}") from error
    return _Dataset(title, found)


def to_row(value: Any) -> Row | str:
    """A row, or why it is none."""
    return value if isinstance(value, dict) else f"is no table of columns but {_kind(value)}"


class JsonLines:
    """One JSON object a line. The file stays open: rows are read by where they begin."""

    def __init__(self, path: str) -> None:
        self.title = path
        self._file = open(path, "rb")
        self._descriptor = self._file.fileno()

    def scan(self) -> Iterator[ScannedRow]:
        """See `DataRows`."""
        at, number = 0, 0
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            while line := file.readline(MOST_BYTES):
                number += 1
                if not line.endswith(b"\n") and len(line) == MOST_BYTES:
                    raise UsageError(f"task.data: {self.title}, row {number}: longer than {MOST_BYTES >> 20} MiB: is it JSONL?")
                if line.strip():
                    found = _parsed(line)
                    row, problem = (None, found) if isinstance(found, str) else (found, "")
                    yield ScannedRow(at, number, row, problem)
                at += len(line)

    def read(self, at: int) -> Row:
        """See `DataRows`."""
        pieces, begin = list[bytes](), at
        while piece := os.pread(self._descriptor, READ_BYTES, begin):  # from any thread
            end = piece.find(b"\n")
            pieces.append(piece if end < 0 else piece[:end])
            begin += len(piece)
            if end >= 0:
                break
        found = _parsed(b"".join(pieces))
        if isinstance(found, str):
            raise UsageError(f"task.data: {self.title} was written to while the run goes on: the row at byte {at} {found}")
        return found


class _Kept:
    """DataRows in memory."""

    def __init__(self, title: str, rows: list[ScannedRow]) -> None:
        self.title, self._rows = title, rows

    def scan(self) -> Iterator[ScannedRow]:
        return iter(self._rows)

    def read(self, at: int) -> Row:
        row = self._rows[at].row
        assert row is not None
        return row


class _Dataset:
    """What `datasets` has opened."""

    def __init__(self, title: str, rows: Any) -> None:
        self.title, self._rows = title, rows

    def scan(self) -> Iterator[ScannedRow]:
        for at, row in enumerate(self._rows):
            yield ScannedRow(at, at + 1, row)

    def read(self, at: int) -> Row:
        return dict(self._rows[at])


def _parsed(line: bytes) -> Row | str:
    """A line's row, or why it has none."""
    try:
        return to_row(json.loads(line))
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"


def _json(file: Path) -> list[ScannedRow]:
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"task.data: {file} is not JSON: {error} (one object a line is JSONL: name it .jsonl)") from None
    if not isinstance(values, list):
        raise UsageError(f"task.data: {file} is to be a JSON list of rows, not {_kind(values)}")
    rows = []
    for at, value in enumerate(values):
        found = to_row(value)
        row, problem = (None, found) if isinstance(found, str) else (found, "")
        rows.append(ScannedRow(at, at + 1, row, problem))
    return rows


def _csv(file: Path) -> list[ScannedRow]:
    rows: list[ScannedRow] = []
    csv.field_size_limit(MOST_BYTES)
    with open(file, newline="", encoding="utf-8-sig") as text:
        reader = csv.reader(text, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names) or not all(names):
                raise UsageError(f"task.data: {file}: its first line is to name the columns, each once")
            begins = reader.line_num + 1
            for values in reader:
                if values:
                    problem = "" if len(values) == len(names) else f"has {len(values)} fields, and there are {len(names)} columns"
                    row = None if problem else dict(zip(names, values, strict=True))
                    rows.append(ScannedRow(len(rows), begins, row, problem))
                begins = reader.line_num + 1
        except csv.Error as error:
            raise UsageError(f"task.data: {file}, line {reader.line_num}: {error}") from None
    return rows


def _parquet(path: str) -> Any:
    datasets = _package(f"task.data: {path}")
    try:
        return datasets.Dataset.from_parquet(path)
    except Exception as error:  # a stranger's file: it may be anything
        what = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"task.data: {path} cannot be read: {type(error).__name__}: {what:.300}") from error


def _package(what: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UsageError(f"{what} {NO_DATASETS} ({error})") from None
    datasets.disable_progress_bars()  # a learner's terminal has a view of its own
    return datasets


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
