"""The built-in reward functions, by name. Must not know processes, groups or torch.

Each gets from a row of data what it wants (`wanted`, which may refuse the row) and gives an answer a number (`score`). Those that
may take long on some answers, or run them, say so with `confined`: they must only be called in a process that may be killed
(`learner/rewards/scoring_child.py`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from learner.rewards.examiner import AnswerProcess
from p2p.errors import UsageError
from p2p.verbs import nearest

JUDGE = "judge"
"""The name of the reward function that asks a judge: `learner/rewards/judge.py`."""

NO_VERIFIER = "math-verify, which is not installed: pip install '.[rewards]' from Shoal's checkout"
NO_SCHEMAS = "jsonschema, which is not installed: pip install '.[rewards]' from Shoal's checkout"
"""What is said where a package of the extra `rewards` is missing."""


class BuiltIn:
    """A reward function that comes with Shoal. Its options are the arguments that it is made with."""

    confined = False
    """`score` may take long or run out of memory on some answers"""
    runs_answers = False
    """`score` may run an answer as code: it must not happen where files can be read or written"""
    examined = False
    """the answer is code that runs in a process of its own: `examine` is called in place of `score`"""

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Columns that it cannot do without, where it is made with these options."""
        chosen = {p.name: p.default for p in inspect.signature(cls).parameters.values()} | dict(options)
        return tuple(str(chosen[name]) for name in ("column", "pattern_column") if chosen.get(name))

    def wanted(self, columns: Mapping[str, Any]) -> Any:
        """What a row says of right answers; None where the function does not apply to this row. UsageError for a row that it
        cannot use."""
        raise NotImplementedError

    def score(self, wanted: Any, completion: str) -> float:
        """What the completion is worth, `wanted` being the row's."""
        raise NotImplementedError

    def code_of(self, completion: str) -> str:
        """The code in a completion, where answers are `examined`."""
        raise NotImplementedError

    def examine(self, wanted: Any, answer: AnswerProcess) -> float:
        """What the code that `answer` runs is worth, `wanted` being the row's."""
        raise NotImplementedError


def from_column(columns: Mapping[str, Any], column: str) -> Any:
    """A row's value. UsageError when it has no such column."""
    if column not in columns:
        raise UsageError(f"the row has no column {column!r} (it has {', '.join(map(repr, columns)) or 'none'})")
    return columns[column]


class _OneAnswer(BuiltIn):
    """The right answer stands in a column. None there: the function does not apply."""

    def __init__(self, *, column: str = "answer", ignore_case: bool = False) -> None:
        self.column, self.ignore_case = column, ignore_case

    def wanted(self, columns: Mapping[str, Any]) -> Any:
        value = from_column(columns, self.column)
        return None if value is None else str(value)

    def score(self, wanted: Any, completion: str) -> float:
        found = self.find(completion)
        return float(found is not None and self._same(found) == self._same(wanted))

    def find(self, completion: str) -> str | None:
        """The answer that a completion gives; None where it gives none."""
        raise NotImplementedError

    def _same(self, text: str) -> str:
        """What two texts that count as equal share: white space and, if asked, case do not count."""
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


class Exact(_OneAnswer):
    """1 when the whole completion is the column's value."""

    def find(self, completion: str) -> str | None:
        return completion


class Boxed(_OneAnswer):
    r"""1 when the last \boxed{...} holds the column's value."""

    def find(self, completion: str) -> str | None:
        r"""What stands in the last \boxed{...} that is closed."""
        start = completion.rfind("\\boxed{")
        if start < 0:
            return None
        depth, begin = 1, start + len("\\boxed{")
        for i in range(begin, len(completion)):
            depth += {"{": 1, "}": -1}.get(completion[i], 0)
            if not depth:
                return completion[begin:i]
        return None


class Tagged(_OneAnswer):
    """1 when the last <answer>...</answer> holds the column's value; another tag by the option `tag`."""

    def __init__(self, *, tag: str = "answer", column: str = "answer", ignore_case: bool = False) -> None:
        super().__init__(column=column, ignore_case=ignore_case)
        self.opening, self.closing = f"<{tag}>", f"</{tag}>"

    def find(self, completion: str) -> str | None:
        """What stands between the last pair of tags."""
        end = completion.rfind(self.closing)
        start = completion.rfind(self.opening, 0, end) if end >= 0 else -1
        return None if start < 0 else completion[start + len(self.opening) : end]


class Regex(BuiltIn):
    """1 when the pattern is found in the completion. With `column` the pattern's first group (or all of it) must be the column's
    value; with `pattern_column` each row has its own pattern."""

    confined = True  # some patterns take for ever on some texts

    def __init__(self, *, pattern: str = "", column: str = "", pattern_column: str = "") -> None:
        if bool(pattern) == bool(pattern_column):
            raise UsageError("reward regex needs one of the options pattern and pattern_column")
        self.column, self.pattern_column = column, pattern_column
        self.pattern = self._compiled(pattern) if pattern else None

    @staticmethod
    def _compiled(pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise UsageError(f"reward regex: {pattern!r} is no regular expression: {error}") from None

    def wanted(self, columns: Mapping[str, Any]) -> Any:
        pattern = self.pattern or self._compiled(str(from_column(columns, self.pattern_column)))
        return pattern, str(from_column(columns, self.column)) if self.column else None

    def score(self, wanted: Any, completion: str) -> float:
        """See `BuiltIn.score`."""
        pattern, right = wanted
        found = pattern.search(completion)
        if found is None or right is None:
            return float(found is not None)
        return float((found[1] if pattern.groups else found[0] or "").strip() == right.strip())


class MathVerify(BuiltIn):
    """1 when the math-verify package finds the completion's value equal to the column's. It does not apply where the package
    cannot read the column's value."""

    confined = True
    runs_answers = True  # sympy's parser evaluates text

    def __init__(self, *, column: str = "answer") -> None:
        self.column = column
        try:
            from math_verify import parse, verify  # type: ignore[import-not-found]
        except ModuleNotFoundError as error:
            raise UsageError(f"reward math_verify needs the package {NO_VERIFIER} ({error})") from None
        self._parse, self._verify = parse, verify

    def wanted(self, columns: Mapping[str, Any]) -> Any:
        text = str(from_column(columns, self.column))
        # Its default reads latex only within $ signs; a column has the bare value.
        return self._parse(text) or self._parse(f"${text}$") or None

    def score(self, wanted: Any, completion: str) -> float:
        # Its own time limits are signals of whole seconds; the process that this runs in has a deadline.
        found = self._parse(completion, parsing_timeout=None)
        return float(bool(found) and self._verify(wanted, found, timeout_seconds=None))


class JsonSchema(BuiltIn):
    """1 when the completion, or the last fenced block in it, is JSON that fits the schema: the option `schema`, or the row's
    column of that name."""

    confined = True  # a schema may have patterns

    def __init__(self, *, schema: Mapping[str, Any] | None = None, column: str = "schema") -> None:
        try:
            import jsonschema  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise UsageError(f"reward json_schema needs the package {NO_SCHEMAS} ({error})") from None
        self.column, self._make, self._wrong = column, jsonschema.validators.validator_for, jsonschema.SchemaError
        self._validator = None if schema is None else self._of(schema)

    @classmethod
    def needs(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """See `BuiltIn.needs`."""
        return () if options.get("schema") is not None else super().needs(options)

    def _of(self, schema: Any) -> Any:
        try:
            kind = self._make(schema)
            kind.check_schema(schema)
        except self._wrong as error:
            raise UsageError(f"reward json_schema: the schema is none: {error.message}") from None
        return kind(schema)

    def wanted(self, columns: Mapping[str, Any]) -> Any:
        """The schema, ready to check with."""
        if self._validator is not None:
            return self._validator
        schema = from_column(columns, self.column)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise UsageError(f"column {self.column!r} is not JSON: {error}") from None
        return self._of(schema)

    def score(self, wanted: Any, completion: str) -> float:
        """See `BuiltIn.score`."""
        try:
            value = json.loads(last_block(completion))
        except ValueError:
            return 0.0
        return float(wanted.is_valid(value))


class UnitTests(BuiltIn):
    """The share of a row's tests that the completion's Python code passes; with `all_or_nothing` 1 only when it passes them all.

    The column is one test or a list of them. A test is Python code that raises where the answer is wrong (`assert f(2) == 4`),
    or a table {input, output}: what is put in and what must be printed. The answer's code runs in a process of its own, anew for
    each test, and tests use what it made through stand-ins (`learner/rewards/examiner.py`): it cannot claim to have passed.
    """

    confined = True
    runs_answers = True
    examined = True

    def __init__(self, *, column: str = "tests", all_or_nothing: bool = False) -> None:
        self.column, self.all_or_nothing = column, all_or_nothing

    def wanted(self, columns: Mapping[str, Any]) -> Any:
        """The row's tests, ready to be run."""
        tests = from_column(columns, self.column)
        tests = [tests] if isinstance(tests, (str, Mapping)) else tests
        if not isinstance(tests, Sequence) or not tests:
            raise UsageError(f"column {self.column!r} has no tests")
        return [self._test(test) for test in tests]

    def _test(self, test: Any) -> CodeType | _Printed:
        if isinstance(test, Mapping):
            if not {"input", "output"} <= test.keys():
                raise UsageError(f"column {self.column!r}: a test is Python code, or has input and output")
            return _Printed(str(test["input"]), str(test["output"]).split())
        try:
            code: CodeType = compile(str(test), "<test>", "exec")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"column {self.column!r}: a test is not Python: {error}") from None
        return code

    def code_of(self, completion: str) -> str:
        return last_block(completion)

    def examine(self, wanted: Any, answer: AnswerProcess) -> float:
        passed = sum(_passed(test, answer) for test in wanted)
        return float(passed == len(wanted)) if self.all_or_nothing else passed / len(wanted)


class _Printed(NamedTuple):
    """A test by what is printed."""

    given: str
    words: list[str]


def _passed(test: CodeType | _Printed, answer: AnswerProcess) -> bool:
    try:
        if isinstance(test, _Printed):
            return answer.prints(test.given) == test.words
        return answer.passes(test)
    except BaseException:  # a test may raise anything, for whatever the answer made of it
        return False


def last_block(completion: str) -> str:
    """What stands in the last fenced block (three backticks) that is closed; the whole text where there is none."""
    end = completion.rfind("```")
    start = completion.rfind("```", 0, end) if end > 0 else -1
    if start < 0:
        return completion.strip()
    first, newline, rest = completion[start + 3 : end].partition("\n")
    return (rest if newline and not first.strip().count(" ") and "{" not in first else completion[start + 3 : end]).strip()


BUILT_IN: dict[str, type[BuiltIn]] = {
    "exact": Exact, "regex": Regex, "boxed": Boxed, "tagged": Tagged, "math_verify": MathVerify, "json_schema": JsonSchema,
    "unit_tests": UnitTests,
}  # fmt: skip


def check_built_in(name: str) -> None:
    """UsageError when there is no built-in reward function of this name."""
    if name not in BUILT_IN and name != JUDGE:
        known = ", ".join([*BUILT_IN, JUDGE, "file.py:function", "module:function"])
        raise UsageError(f"task.reward: unknown reward function {name!r}{nearest(name, BUILT_IN) or f'; known: {known}'}")


def make_built_in(name: str, options: Mapping[str, Any]) -> BuiltIn:
    """The reward function of this name. UsageError when there is none, or these are not its options."""
    check_built_in(name)
    try:
        return BUILT_IN[name](**options)
    except TypeError as error:
        raise UsageError(f"task.reward: {name} with the options {dict(options)}: {error}") from None
