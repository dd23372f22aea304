"""Which heads: sets of (layer, query head) pairs of one model shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asu_interp.errors import HeadError
from asu_interp.files import read_json, write_json


class HasHeads(Protocol):
    """Anything with layers of query heads: a Model, or another HeadSet."""

    @property
    def n_layers(self) -> int: ...

    @property
    def n_heads(self) -> int: ...


GRAMMAR = '"all", "none", "*.1" (head 1 of every layer), "6-8.*" (layers 6 to 8), "3.4,10.0-2" (a list)'


@dataclass(frozen=True)
class HeadSet:
    """A set of query heads, with how it was chosen; supports | & - ^ ~, len, in, iteration and ==."""

    pairs: frozenset[tuple[int, int]]
    n_layers: int
    n_heads: int
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for layer, head in self.pairs:
            _check("layer", layer, self.n_layers, f"{layer}.{head}")
            _check("head", head, self.n_heads, f"{layer}.{head}")

    @classmethod
    def parse(cls, text: str, model: HasHeads) -> HeadSet:
        """Read a set such as "all", "*.1", "6-8.*" or "3.4,10.0-2". Raises HeadError."""
        pairs: set[tuple[int, int]] = set()
        for part in text.replace(" ", "").split(","):
            if part == "none":
                continue
            layers, dot, heads = ("*", ".", "*") if part == "all" else part.partition(".")
            if not dot:
                raise HeadError(f'HeadSet "{text}": "{part}" is not layer.head; allowed: {GRAMMAR}')
            for layer in _numbers(layers, model.n_layers, "layer", text):
                pairs |= {(layer, head) for head in _numbers(heads, model.n_heads, "head", text)}
        return cls(frozenset(pairs), model.n_layers, model.n_heads, origin=text)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]], model: HasHeads, origin: str = "") -> HeadSet:
        """The given (layer, head) pairs. Raises HeadError for one that the model does not have."""
        return cls(frozenset(pairs), model.n_layers, model.n_heads, origin)

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "layer head"], origin: str = "") -> HeadSet:
        """The heads where the mask is True."""
        pairs = [(layer, head) for layer, head in mask.nonzero().tolist()]
        return cls(frozenset(pairs), mask.shape[0], mask.shape[1], origin)

    @classmethod
    def top(cls, scores: Float[Tensor, "layer head"], k: int, origin: str = "") -> HeadSet:
        """The k heads with the highest scores; ties go to the earlier head; NaN is never chosen."""
        n = int((~scores.isnan()).sum())
        if not 0 <= k <= n:
            raise HeadError(f"top {k}: {n} heads have a score")
        ranked = scores.flatten().nan_to_num(-torch.inf).sort(descending=True, stable=True)
        mask = torch.zeros(scores.numel(), dtype=torch.bool)
        mask[ranked.indices[:k]] = True
        return cls.from_mask(mask.view(scores.shape), origin or f"top {k}")

    @classmethod
    def random(cls, model: HasHeads, k: int, seed: int) -> HeadSet:
        """k heads drawn without replacement."""
        scores = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
        return cls.top(scores, k, f"random {k}, seed {seed}")

    @property
    def mask(self) -> Bool[Tensor, "layer head"]:
        mask = torch.zeros(self.n_layers, self.n_heads, dtype=torch.bool)
        for layer, head in self.pairs:
            mask[layer, head] = True
        return mask

    @property
    def layers(self) -> list[int]:
        """The layers that hold at least one head of the set."""
        return sorted({layer for layer, _ in self.pairs})

    def require(self, model: HasHeads) -> HeadSet:
        """The set itself if it was made for a model of this shape. Raises HeadError."""
        if (self.n_layers, self.n_heads) != (model.n_layers, model.n_heads):
            raise HeadError(
                f"HeadSet of a model with {self.n_layers} layers of {self.n_heads} heads; "
                f"this model has {model.n_layers} of {model.n_heads}"
            )
        return self

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self.pairs))

    def __contains__(self, pair: object) -> bool:
        return pair in self.pairs

    def _combine(self, other: HeadSet, pairs: frozenset[tuple[int, int]], sign: str) -> HeadSet:
        other.require(self)
        return HeadSet(pairs, self.n_layers, self.n_heads, f"({self.origin} {sign} {other.origin})")

    def __or__(self, other: HeadSet) -> HeadSet:
        return self._combine(other, self.pairs | other.pairs, "|")

    def __and__(self, other: HeadSet) -> HeadSet:
        return self._combine(other, self.pairs & other.pairs, "&")

    def __sub__(self, other: HeadSet) -> HeadSet:
        return self._combine(other, self.pairs - other.pairs, "-")

    def __xor__(self, other: HeadSet) -> HeadSet:
        return self._combine(other, self.pairs ^ other.pairs, "^")

    def __invert__(self) -> HeadSet:
        return HeadSet.from_mask(~self.mask, f"~{self.origin}")

    def __str__(self) -> str:
        """The shortest text of the grammar that `parse` reads back."""
        if len(self) == self.n_layers * self.n_heads:
            return "all"
        heads_of: dict[int, list[int]] = {}
        for layer, head in self:
            heads_of.setdefault(layer, []).append(head)
        parts = []
        for layers, heads in _bands(heads_of):
            whole = len(heads) == self.n_heads
            parts += [f"{layers}.{run}" for run in (["*"] if whole else _runs(heads))]
        return ",".join(parts) or "none"

    def to_dict(self) -> dict[str, Any]:
        return {"heads": str(self), "n_layers": self.n_layers, "n_heads": self.n_heads, "origin": self.origin}

    @classmethod
    def from_dict(cls, data: Any) -> HeadSet:
        """Raises HeadError if the data is not what `to_dict` writes."""
        try:
            shape = cls(frozenset(), int(data["n_layers"]), int(data["n_heads"]))
            heads = cls.parse(data["heads"], shape)
            return cls(heads.pairs, shape.n_layers, shape.n_heads, str(data.get("origin", "")))
        except HeadError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise HeadError(f"not a head set: needs heads, n_layers, n_heads ({error!r})") from error

    def save(self, path: str | Path) -> None:
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> HeadSet:
        return cls.from_dict(read_json(Path(path), "head set"))


def _numbers(text: str, limit: int, kind: str, whole: str) -> range:
    if text == "*":
        return range(limit)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise HeadError(f'HeadSet "{whole}": "{text}" is no {kind}; allowed: {GRAMMAR}')
    first, last = int(match[1]), int(match[2] or match[1])
    for number in (first, last):
        _check(kind, number, limit, whole)
    if last < first:
        raise HeadError(f'HeadSet "{whole}": {kind}s {text} run backwards')
    return range(first, last + 1)


def _check(kind: str, number: int, limit: int, whole: str) -> None:
    if not 0 <= number < limit:
        plural = f"{kind}s 0-{limit - 1}"
        raise HeadError(f'HeadSet "{whole}": {kind} {number}, this model has {plural}')


def _runs(numbers: list[int]) -> list[str]:
    """[0, 1, 2, 5] -> ["0-2", "5"]"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]


def _bands(heads_of: dict[int, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Neighbouring layers with the same heads, as ("6-8", heads)."""
    layers = sorted(heads_of)
    while layers:
        band = [layers.pop(0)]
        while layers and layers[0] == band[-1] + 1 and heads_of[layers[0]] == heads_of[band[0]]:
            band.append(layers.pop(0))
        yield _runs(band)[0], heads_of[band[0]]
