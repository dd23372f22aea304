"""From the text that names data, such as "demo" or "facts.jsonl[0:40]", to a FactSet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asu_interp.data.builtin import load_builtin
from asu_interp.data.facts import FactSet
from asu_interp.data.jsonl import load_jsonl
from asu_interp.data.names import unknown
from asu_interp.data.tofu import load_tofu
from asu_interp.errors import FactsError

LOADERS: dict[str, Callable[[str], FactSet]] = {"demo": load_builtin, "tofu": load_tofu}
GRAMMAR = ("demo", "demo:RELATION", "demo:RELATION/GROUP", "tofu:forget10", "tofu:forget10@DIR", "FILE.jsonl")

# A bracket in the middle of a path is part of its name.
_DATA = re.compile(r"(?P<source>.*?)(?P<cut>\[(?!.*\.jsonl$)[^/\[]*)?", re.DOTALL)
_RANGE = r"((?:-?\d{1,9})?:(?:-?\d{1,9})?)"
_CUT = re.compile(rf"(?:\[{_RANGE}(?:,{_RANGE})?\])?")


def load_facts(data: str | Path) -> FactSet:
    """Read `data`: one of GRAMMAR, and after it perhaps a slice of the forget set, or of both sets.

    "[0:40]" keeps the first 40 facts to forget, "[0:40,:200]" also the first 200 to keep; neighbours are marked
    before. Raises FactsError.
    """
    text = str(data)
    match = _DATA.fullmatch(text)
    assert match is not None  # every text fits
    slices = _slices(match["cut"] or "", text)
    facts = replace(_load(match["source"]), name=text)
    for name, chosen in zip(("forget", "retain"), slices, strict=False):
        all_facts = getattr(facts, name)
        if not all_facts[chosen]:
            raise FactsError(f'"{text}": the slice leaves nothing of the {len(all_facts)} facts to {name}')
        facts = replace(facts, **{name: all_facts[chosen]})
    return facts


def _load(source: str) -> FactSet:
    if source.endswith(".jsonl"):
        return load_jsonl(Path(source).expanduser())
    name, colon, choice = source.partition(":")
    if name not in LOADERS:
        raise unknown("data", source, GRAMMAR)
    if colon and not choice:
        raise FactsError(f'data "{source}": nothing after the colon; allowed: {", ".join(GRAMMAR)}')
    return LOADERS[name](choice)


def _slices(cut: str, text: str) -> list[slice]:
    """The slices in "[a:b]" or "[a:b,c:d]"; none in an empty text."""
    match = _CUT.fullmatch(cut.replace(" ", ""))
    if match is None:
        raise FactsError(f'"{text}": the slice is not one such as [0:40], [-40:] or [0:40,0:200]')
    return [_slice(part) for part in match.groups() if part]


def _slice(part: str) -> slice:
    start, stop = part.split(":")
    return slice(int(start) if start else None, int(stop) if stop else None)
