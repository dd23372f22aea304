"""The built-in facts and neutral sentences, and which of the facts are to be forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from asu_interp.data.facts import Fact, FactSet, split_by
from asu_interp.data.jsonl import fact_of, read_lines
from asu_interp.data.names import unknown

DEFAULT_FORGET = ("capital", "Asia")  # relation, group


def load_builtin(choice: str = "") -> FactSet:
    """The built-in set, of which "RELATION/GROUP" or a whole "RELATION" is to be forgotten. Raises FactsError."""
    relation, slash, group = choice.partition("/") if choice else (DEFAULT_FORGET[0], "/", DEFAULT_FORGET[1])
    facts = builtin_facts()
    _known("demo relation", relation, (fact.relation for fact in facts))
    if slash:
        _known(f"demo group of {relation}", group, (fact.group for fact in facts if fact.relation == relation))
    forget, retain = split_by(facts, lambda fact: fact.relation == relation and (not slash or fact.group == group))
    return FactSet(f"demo:{relation}{slash}{group}", forget, retain, neutral_texts())


@cache
def builtin_facts() -> tuple[Fact, ...]:
    """All built-in facts, in file order."""
    return tuple(read_lines(files("asu_interp.data") / "demo.jsonl", lambda row, _: fact_of(row)))


@cache
def neutral_texts() -> tuple[str, ...]:
    """English sentences that have nothing to do with the built-in facts."""
    text = (files("asu_interp.data") / "neutral.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line)


def _known(what: str, name: str, allowed: Iterable[str]) -> None:
    names = sorted(set(allowed))
    if name not in names:
        raise unknown(what, name, names)
