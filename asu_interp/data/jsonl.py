"""Facts from a file of JSON lines; every bad line is reported, and then nothing is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from asu_interp.data.facts import Fact, FactSet, split_by
from asu_interp.data.names import unknown
from asu_interp.errors import FactsError

T = TypeVar("T")
Row = dict[str, Any]

FACT_FIELDS = ("prompt", "question", "answer", "target", "paraphrases", "subject", "relation", "group", "spans",
               "split", "neighbour")  # fmt: skip
NEUTRAL_FIELDS = ("text", "split")
SPLITS = ("forget", "retain", "neutral")
PROBLEMS_SHOWN = 20


class _Sample(NamedTuple):
    """One line: a fact with its split, or a neutral text."""

    split: str
    fact: Fact | None = None
    neighbour: bool | None = None  # None: the line does not say
    text: str = ""


def load_jsonl(path: Path) -> FactSet:
    """Facts and neutral texts of a file, one JSON object a line. Raises one FactsError for all its bad lines.

    A fact to keep that does not say whether it is a neighbour is one if it shares relation or subject with a
    fact to forget.
    """
    first: dict[str, int] = {}
    samples = read_lines(path, lambda row, number: _sample(row, number, first))
    if not samples:
        raise FactsError(f"{path}: is empty")
    split = {sample.fact: sample.split for sample in samples if sample.fact}
    said = {s.fact.prompt: s.neighbour for s in samples if s.fact and s.neighbour is not None}
    forget, retain = split_by(list(split), lambda fact: split[fact] == "forget")
    return FactSet(
        name=str(path),
        forget=forget,
        retain=tuple(replace(fact, neighbour=said.get(fact.prompt, fact.neighbour)) for fact in retain),
        neutral=tuple(sample.text for sample in samples if sample.text),
    )


def read_lines(path: Path | Traversable, parse: Callable[[Row, int], T]) -> list[T]:
    """What `parse` makes of each line's JSON object and number. Raises one FactsError for all bad lines."""
    parsed: list[T] = []
    problems: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            parsed.append(parse(_json_object(line), number))
        except FactsError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = len(problems) - PROBLEMS_SHOWN
        shown = problems[:PROBLEMS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        lines = "1 line is" if len(problems) == 1 else f"{len(problems)} lines are"
        raise FactsError("\n  ".join([f"{path}: {lines} bad, so nothing was read", *shown]))
    return parsed


def fact_of(row: Row) -> Fact:
    """The fact that a JSON object states. Raises FactsError."""
    _allow_only(row, FACT_FIELDS)
    if "prompt" in row and "question" in row:
        raise FactsError("prompt and question: are the same thing, give one")
    answer = text_in(row, "answer")
    return Fact(
        prompt=text_in(row, "question" if "question" in row else "prompt"),
        answer=answer,
        target=text_in(row, "target", ""),
        paraphrases=_paraphrases(row),
        subject=text_in(row, "subject", ""),
        relation=text_in(row, "relation", ""),
        group=text_in(row, "group", ""),
        spans=_spans(row, len(answer)),
    )


def text_in(row: Row, name: str, default: str | None = None) -> str:
    """The text of a field. Raises FactsError if it is missing without a default, no text, or empty."""
    if name not in row and default is None:
        raise FactsError(f"{name}: is missing")
    return _text(row[name], name) if name in row else str(default)


def _lines(path: Path | Traversable) -> list[bytes]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FactsError(f"{path}: no such file") from None
    except OSError as error:
        raise FactsError(f"{path}: cannot be read: {error.strerror or error}") from error
    # Bytes, so that a wrong encoding has a line; some editors put a byte order mark before the first.
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines[:-1] if not lines[-1] else lines


def _json_object(line: bytes) -> Row:
    if not line.strip():
        raise FactsError("is blank")
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        raise FactsError(f"is not UTF-8: {wrong}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise FactsError(f"broken JSON at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep, or a repeated field
        raise FactsError(f"broken JSON: {error}") from None
    if not isinstance(row, dict):
        raise FactsError(f"is {_kind(row)}, must be a JSON object")
    return row


def _without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    row: Row = {}
    for name, value in pairs:
        if name in row:
            raise FactsError(f'field "{name}" is given twice')
        row[name] = value
    return row


def _sample(row: Row, number: int, first: dict[str, int]) -> _Sample:
    split = text_in(row, "split", "neutral" if "text" in row else "forget")
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if split == "neutral":
        _allow_only(row, NEUTRAL_FIELDS)
        return _Sample(split, text=text_in(row, "text"))
    prompt = row.get("prompt", row.get("question"))
    # Before everything else, so that a line with two faults still counts as the first of its prompt.
    if isinstance(prompt, str) and first.setdefault(prompt, number) != number:
        raise FactsError(f'prompt "{prompt}": stands on line {first[prompt]} already')
    return _Sample(split, fact_of(row), _neighbour(row, split))


def _neighbour(row: Row, split: str) -> bool | None:
    value = row.get("neighbour")
    if "neighbour" in row and not isinstance(value, bool):
        raise FactsError(f"neighbour: is {_kind(value)}, must be true or false")
    if value and split == "forget":
        raise FactsError('neighbour: only a fact to keep can be one; add "split": "retain"')
    return value


def _paraphrases(row: Row) -> tuple[str, ...]:
    values = row.get("paraphrases", [])
    if not isinstance(values, list):
        raise FactsError(f"paraphrases: is {_kind(values)}, must be a list of texts")
    return tuple(_text(value, f"paraphrase {i}") for i, value in enumerate(values, start=1))


def _spans(row: Row, length: int) -> tuple[tuple[int, int], ...] | None:
    if "spans" not in row:
        return None
    spans = row["spans"]
    # type, not isinstance: true is an int.
    if not isinstance(spans, list) or not all(
        isinstance(span, list) and [type(end) for end in span] == [int, int] for span in spans
    ):
        raise FactsError("spans: must be a list of [start, end] character offsets in the answer")
    done = 0
    for start, end in spans:
        if not done <= start < end <= length:
            raise FactsError(
                f"spans: [{start}, {end}] must lie between {done} and {length}: "
                f"in the answer, not empty, in order and without overlap"
            )
        done = end
    return tuple((start, end) for start, end in spans)


def _allow_only(row: Row, allowed: tuple[str, ...]) -> None:
    for name in row:
        if name not in allowed:
            raise unknown("field", name, allowed)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise FactsError(f"{what}: is {_kind(value)}, must be text")
    if not value.strip():
        raise FactsError(f"{what}: is empty")
    if any("\ud800" <= char <= "\udfff" for char in value):  # JSON can say it, tokenizers cannot read it
        raise FactsError(f"{what}: holds half a character (an unpaired \\ud800-\\udfff escape)")
    return value


def _kind(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
