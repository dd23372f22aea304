"""Is what the model says still language? Repetition, variety, emptiness, and what the original makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from asu_interp.data.batches import Encoded, encode_texts
from asu_interp.lens.response import score_encoded
from asu_interp.models import Model


@dataclass(frozen=True)
class Coherence:
    """Shares are over all texts together; perplexity is of the non-empty ones, None if all are empty."""

    perplexity: float | None
    repeated_trigrams: float  # share of trigrams of a text that it has said before
    distinct_bigrams: float  # different bigrams over bigrams, within texts
    empty: float  # share of texts without a word
    n: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def coherence(judge: Model, prompts: Sequence[str], stems: Sequence[str], texts: Sequence[str]) -> Coherence:
    """Judge continuations of prompt and stem; perplexity is under `judge`, the original model."""
    words = [text.split() for text in texts]
    trigrams, bigrams = [_ngrams(w, 3) for w in words], [_ngrams(w, 2) for w in words]
    encoded = [
        _continuation(judge, prompt, stem, text)
        for prompt, stem, text, w in zip(prompts, stems, texts, words, strict=True)
        if w
    ]
    nll = score_encoded(judge, encoded).nll if encoded else torch.empty(0)
    return Coherence(
        perplexity=math.exp(float(nll.mean())) if len(nll) else None,
        repeated_trigrams=1 - _distinct_share(trigrams),
        distinct_bigrams=_distinct_share(bigrams),
        empty=sum(not w for w in words) / max(1, len(words)),
        n=len(texts),
    )


def perplexity(model: Model, texts: Sequence[str]) -> float:
    """exp of the mean NLL over all tokens of the texts but each one's first."""
    return math.exp(float(score_encoded(model, encode_texts(model, texts)).nll.mean()))


def _continuation(model: Model, prompt: str, stem: str, text: str) -> Encoded:
    """The generated text is scored; prompt and stem were given."""
    prompt_ids, stem_ids = model.encode(prompt, stem, end=False)
    _, answer_ids = model.encode(prompt, (stem + text) if stem else text.strip(), end=False)
    given = min(len(stem_ids), len(answer_ids) - 1)
    return Encoded((*prompt_ids, *answer_ids[:given]), tuple(answer_ids[given:]))


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _distinct_share(texts: Sequence[Sequence[tuple[str, ...]]]) -> float:
    total = sum(map(len, texts))
    return sum(len(set(text)) for text in texts) / total if total else 1.0
