"""TOFU (arXiv 2401.06121): questions about invented authors, from the hub or from a local copy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asu_interp.data.facts import Fact, FactSet
from asu_interp.data.jsonl import Row, read_lines, text_in
from asu_interp.data.names import unknown
from asu_interp.errors import FactsError

log = logging.getLogger(__name__)

HUB_NAME = "locuslab/TOFU"
COMPLEMENT = {"forget01": "retain99", "forget05": "retain95", "forget10": "retain90"}
FORGET = {retain: forget for forget, retain in COMPLEMENT.items()}


def load_tofu(choice: str) -> FactSet:
    """The split named by "forget10" (hub) or "forget10@DIR" (local copy), and its complement. Raises FactsError.

    TOFU asks "What is the full name of the author?" about two authors (rows 100 and 440 of every retain split).
    Nobody can know which one is meant, so only the first row of a question becomes a fact.
    """
    forget, at, folder = choice.partition("@")
    if forget not in COMPLEMENT:
        raise unknown("TOFU split", forget, COMPLEMENT)
    if at and not folder:
        raise FactsError(f'"tofu:{choice}": the directory after @ is missing')
    directory = Path(folder).expanduser() if at else None
    retain = COMPLEMENT[forget]
    return FactSet(
        name=f"tofu:{choice}",
        forget=_facts(forget, f"{forget}_perturbed", directory),
        retain=_facts(retain, "retain_perturbed", directory),
    )


def tofu_rows(split: str, directory: Path | None = None) -> list[Row]:
    """All rows of a TOFU split with the hub's field names; without a directory, from the hub. Raises FactsError.

    A local copy without `retain99` or `retain95` still gives them: `retain90`, then what of `forget10` stays.
    """
    if directory is None:
        return _hub_rows(split)
    path = directory / f"{split}.json"
    if not path.is_file() and split in ("retain99", "retain95"):
        return _rest_of_all(FORGET[split], directory)
    if not path.is_file():
        raise FactsError(f"{path}: no such file; a copy of TOFU holds forget10.json, retain90.json and so on")
    return read_lines(path, lambda row, _: _checked(row))


def _facts(split: str, perturbed: str, directory: Path | None) -> tuple[Fact, ...]:
    rows = tofu_rows(split, directory)
    paraphrases = _paraphrases(perturbed, directory)
    facts: dict[str, Fact] = {}
    for row in rows:
        key = row["question"], row["answer"]
        facts.setdefault(row["question"], Fact(*key, paraphrases=paraphrases.get(key, ())))
    if len(facts) < len(rows):
        log.info("TOFU %s: %d rows repeat a question and are left out", split, len(rows) - len(facts))
    return tuple(facts.values())


def _paraphrases(perturbed: str, directory: Path | None) -> dict[tuple[str, str], tuple[str, ...]]:
    """(question, answer) -> paraphrased question; none where a local copy lacks the perturbed split."""
    if directory is not None and not (directory / f"{perturbed}.json").is_file():
        return {}
    return {
        (row["question"], row["answer"]): (row["paraphrased_question"],)
        for row in tofu_rows(perturbed, directory)
        if row.get("paraphrased_question")
    }


def _rest_of_all(forget: str, directory: Path) -> list[Row]:
    """All of TOFU is `retain90` followed by `forget10`, which ends with `forget05` and `forget01`."""
    last, lost = tofu_rows("forget10", directory), tofu_rows(forget, directory)
    if last[-len(lost) :] != lost:
        raise FactsError(
            f"{directory}: {COMPLEMENT[forget]}.json is missing and cannot be made up, "
            f"because {forget}.json is not the end of forget10.json"
        )
    return tofu_rows("retain90", directory) + last[: -len(lost)]


def _hub_rows(split: str) -> list[Row]:
    try:
        import datasets  # slow to import, and only the hub needs it
    except ImportError as error:
        raise _no_hub(split, 'needs the package "datasets": pip install datasets') from error
    try:
        rows: Iterable[Any] = datasets.load_dataset(HUB_NAME, split, split="train")
    except (OSError, ValueError) as error:  # no network or no such repository; no such configuration
        raise _no_hub(split, f"not to be had from the hub ({error})") from error
    return [_checked(dict(row)) for row in rows]


def _no_hub(split: str, why: str) -> FactsError:
    return FactsError(f"TOFU {split}: {why}; with a local copy, write tofu:forget10@DIR")


def _checked(row: Row) -> Row:
    for name in ("question", "answer"):
        text_in(row, name)
    return row
