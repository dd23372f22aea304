"""What a model may know: facts, and the sets of them that are to be forgotten and kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asu_interp.errors import FactsError

if TYPE_CHECKING:
    from asu_interp.models import Model


@dataclass(frozen=True)
class Fact:
    """A prompt and the answer that a model which knows the fact gives.

    `target` is the part of the answer that gives the fact away ("Havana" in "The capital of Cuba is Havana.");
    without one the whole answer is. `paraphrases` are other prompts that the target continues. `spans` marks the
    factual characters of the answer by hand ([start, end) offsets) where the default rule is not wanted.
    """

    prompt: str
    answer: str
    target: str = ""
    paraphrases: tuple[str, ...] = ()
    subject: str = ""
    relation: str = ""
    group: str = ""
    neighbour: bool = False
    spans: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "answer"):
            if not getattr(self, name).strip():
                raise FactsError(f'{name} of "{self.prompt or self.answer}": is empty')
        if not re.search(r"\w", self.target or self.answer):
            raise FactsError(f'answer to "{self.prompt}": has no letter or digit, so recall cannot be told')
        if self.target and self.target not in self.answer:
            raise FactsError(f'target "{self.target}" of "{self.prompt}": does not occur in the answer')

    @property
    def stem(self) -> str:
        """The answer up to the target, without trailing space: what is given away when recall is tested."""
        return self.answer[: self.answer.rindex(self.target)].rstrip() if self.target else ""

    def recalled_in(self, text: str) -> bool:
        """Whether the text says the target (whole words, any case); without a target, the whole answer."""
        wanted = (self.target or self.answer).strip().rstrip(".")
        return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text, flags=re.IGNORECASE) is not None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", (), None, False)}


@dataclass(frozen=True)
class FactSet:
    """Facts to forget, facts to keep (neighbours marked), and neutral sentences. Raises FactsError on overlap."""

    name: str
    forget: tuple[Fact, ...]
    retain: tuple[Fact, ...]
    neutral: tuple[str, ...] = field(default=())
    known: bool = False  # whether only facts that a model recalls are left

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for set_name, facts in (("forget", self.forget), ("retain", self.retain)):
            for fact in facts:
                if fact.prompt in seen:
                    raise FactsError(f'"{fact.prompt}": in the {seen[fact.prompt]} set and again in {set_name}')
                seen[fact.prompt] = set_name

    @property
    def neighbours(self) -> tuple[Fact, ...]:
        """Facts to keep that stand next to the forgotten ones: the same relation or the same subject."""
        return tuple(fact for fact in self.retain if fact.neighbour)

    def fingerprint(self) -> str:
        """A short hash of the facts to forget and to keep, to tell whether a run was made from these very ones."""
        text = json.dumps([[fact.to_dict() for fact in chosen] for chosen in (self.forget, self.retain)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def thinned(self, n_retain: int) -> FactSet:
        """At most about n facts to keep, evenly drawn; the forget set is whole."""
        every = max(1, -(-len(self.retain) // n_retain))
        return replace(self, retain=self.retain[::every])

    def require(self, *sets: str) -> None:
        """Raise FactsError if one of the named sets is empty."""
        for name in sets:
            if not getattr(self, name):
                raise FactsError(f'facts "{self.name}": the {name} set is empty')

    def known_to(self, model: Model, max_new_tokens: int = 12) -> FactSet:
        """Only the facts that the model says by greedy decoding of prompt and stem."""
        facts = self.forget + self.retain
        texts = recall_texts(model, facts, max_new_tokens)
        known = {fact.prompt for fact, text in zip(facts, texts, strict=True) if fact.recalled_in(text)}
        forget, retain = (tuple(f for f in chosen if f.prompt in known) for chosen in (self.forget, self.retain))
        return replace(self, forget=forget, retain=retain, known=True)


def recall_texts(model: Model, facts: Sequence[Fact], max_new_tokens: int = 12) -> list[str]:
    """What the model says after each fact's prompt and stem."""
    prompts, stems = [fact.prompt for fact in facts], [fact.stem for fact in facts]
    return model.generate(prompts, stems, max_new_tokens=max_new_tokens)


def split_by(facts: Sequence[Fact], forget: Callable[[Fact], bool]) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """Forget and retain sets; what is kept is marked a neighbour if it shares relation or subject with the lost."""
    lost = tuple(fact for fact in facts if forget(fact))
    relations = {fact.relation for fact in lost if fact.relation}
    subjects = {fact.subject for fact in lost if fact.subject}
    kept = tuple(
        replace(fact, neighbour=fact.relation in relations or fact.subject in subjects)
        for fact in facts
        if not forget(fact)
    )
    return lost, kept
