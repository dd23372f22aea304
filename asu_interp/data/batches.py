"""Facts as padded token batches with an answer mask made from lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from asu_interp.data.facts import Fact
from asu_interp.errors import FactsError

if TYPE_CHECKING:
    from asu_interp.models import Model


@dataclass(frozen=True)
class Encoded:
    """One encoded fact: the ids of its prompt and of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences; padding never counts, because every mask comes from the lengths.

    `answer[row, pos]` is True where an answer token stands; its prediction is read one position earlier.
    `index[row]` is the sequence's place in the list that the batch was made from.
    """

    tokens: Int[Tensor, "row pos"]
    attention_mask: Int[Tensor, "row pos"]
    answer: Bool[Tensor, "row pos"]
    index: Int[Tensor, "row"]

    @property
    def reads(self) -> Bool[Tensor, "row pos"]:
        """True where the logits predict an answer token."""
        return self.answer.roll(-1, dims=1)  # position 0 always holds a prompt token

    @property
    def targets(self) -> Int[Tensor, "token"]:
        """The answer tokens, row by row."""
        return self.tokens[self.answer]

    @property
    def token_row(self) -> Int[Tensor, "token"]:
        """The row that each answer token belongs to."""
        return self.answer.nonzero()[:, 0]

    def to(self, device: torch.device) -> Batch:
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "attention_mask", "answer", "index")}
        return replace(self, **moved)


def encode_facts(model: Model, facts: Sequence[Fact]) -> list[Encoded]:
    """Prompt and answer ids of each fact. Raises FactsError (see `Model.encode`)."""
    return [Encoded(*map(tuple, model.encode(fact.prompt, fact.answer))) for fact in facts]


def encode_texts(model: Model, texts: Sequence[str]) -> list[Encoded]:
    """Free text: every token but the first counts as answer, so that it is scored."""
    encoded = []
    for text in texts:
        ids = model.tokenizer(text, add_special_tokens=True).input_ids
        if not 2 <= len(ids) <= model.context:
            raise FactsError(f'text "{text[:60]}": {len(ids)} tokens; 2 to {model.context} are allowed')
        encoded.append(Encoded(tuple(ids[:1]), tuple(ids[1:])))
    return encoded


def make_batch(sequences: Sequence[Encoded], pad_token: int, index: Sequence[int] | None = None) -> Batch:
    """Pad on the right to the longest sequence."""
    width = max(map(len, sequences))
    tokens = torch.full((len(sequences), width), pad_token)
    position = torch.arange(width)
    prompt_length = torch.tensor([len(s.prompt) for s in sequences])[:, None]
    length = torch.tensor([len(s) for s in sequences])[:, None]
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence.prompt + sequence.answer)
    return Batch(
        tokens=tokens,
        attention_mask=(position < length).long(),
        answer=(position >= prompt_length) & (position < length),
        index=torch.tensor(list(index) if index is not None else list(range(len(sequences)))),
    )


def batches(sequences: Sequence[Encoded], pad_token: int, size: int = 16) -> Iterator[Batch]:
    """All sequences, those of similar length together; `Batch.index` says which is which."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield make_batch([sequences[i] for i in chosen], pad_token, chosen)
