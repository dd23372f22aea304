"""Local and global heads, by how far back they look (arXiv 2510.13554)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from asu_interp.data.batches import batches, encode_facts
from asu_interp.data.facts import Fact
from asu_interp.errors import HeadError
from asu_interp.heads import HeadSet
from asu_interp.lens.attention import Rows, visit_attention
from asu_interp.models import Model


@dataclass(frozen=True)
class HeadClasses:
    """Average backward distance d [layer, head] in tokens, share of attention on the first token, and the classes.

    The bottom fraction rho of all heads by distance is local, the top fraction global, the rest mid. The published
    distance counts attention on the first token (the sink), so that a sink head passes for global; with
    `exclude_sinks` the classes come from the distance over the other keys.
    """

    distance: Float[Tensor, "layer head"]
    distance_without_sink: Float[Tensor, "layer head"]
    sink_share: Float[Tensor, "layer head"]
    rho: float
    exclude_sinks: bool
    sink_threshold: float
    n_sequences: int

    @property
    def _ranked(self) -> Float[Tensor, "layer head"]:
        return self.distance_without_sink if self.exclude_sinks else self.distance

    @property
    def _size(self) -> int:
        return round(self.rho * self.distance.numel())

    @property
    def local(self) -> HeadSet:
        return HeadSet.top(-self._ranked, self._size, f"local, rho {self.rho}")

    @property
    def global_(self) -> HeadSet:
        return HeadSet.top(self._ranked, self._size, f"global, rho {self.rho}")

    @property
    def mid(self) -> HeadSet:
        return ~(self.local | self.global_)

    @property
    def sinks(self) -> HeadSet:
        """Heads that keep at least `sink_threshold` of their attention on the first token."""
        return HeadSet.from_mask(self.sink_share >= self.sink_threshold, f"sink share >= {self.sink_threshold}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "rho": self.rho,
            "exclude_sinks": self.exclude_sinks,
            "sink_threshold": self.sink_threshold,
            "n_sequences": self.n_sequences,
            "local": str(self.local),
            "mid": str(self.mid),
            "global": str(self.global_),
            "sinks": str(self.sinks),
            "distance": self.distance.tolist(),
            "distance_without_sink": self.distance_without_sink.tolist(),
            "sink_share": self.sink_share.tolist(),
        }


def classify_heads(
    model: Model,
    facts: Sequence[Fact],
    *,
    rho: float = 0.3,
    exclude_sinks: bool = False,
    sink_threshold: float = 0.5,
    batch_size: int = 16,
) -> HeadClasses:
    """Classify heads on a calibration set (2510.13554):

    d[l,h] = E_x [ 1/|R_x| sum_{t in R_x} sum_{s<=t} A[l,h][t,s] (t - s) ], R_x the answer positions of x.

    Raises HeadError if rho is not in (0, 0.5], FactsError for facts that do not fit the model.
    """
    if not 0 < rho <= 0.5:
        raise HeadError(f"rho = {rho}: a fraction above 0 and at most 0.5, so that local and global stay apart")
    sums = {name: torch.zeros(model.n_layers, model.n_heads) for name in ("distance", "no_sink", "sink")}
    for batch in batches(encode_facts(model, facts), model.pad_token, batch_size):
        # each sequence counts once, however long its answer: weight 1/|R_x|
        weight = (1 / batch.answer.sum(dim=1))[batch.token_row].to(model.device)
        back = _backward_distance(batch.answer.nonzero()[:, 1], batch.tokens.shape[1]).to(model.device)

        def add(layer: int, rows: Rows, weight: Tensor = weight, back: Tensor = back) -> None:
            far = einsum(rows, back, "token head key, token key -> token head")
            sink = rows[..., 0]
            far_without = far - sink * back[:, :1]
            rest = (1 - sink).clamp(min=1e-6)  # a pure sink row looks at nothing else: distance 0
            sums["distance"][layer] += (weight @ far).cpu()
            sums["no_sink"][layer] += (weight @ (far_without / rest)).cpu()
            sums["sink"][layer] += (weight @ sink).cpu()

        visit_attention(model, batch, batch.answer, add)
    n = len(facts)
    return HeadClasses(
        sums["distance"] / n, sums["no_sink"] / n, sums["sink"] / n, rho, exclude_sinks, sink_threshold, n
    )


def _backward_distance(query: Tensor, width: int) -> Float[Tensor, "token key"]:
    return (query[:, None] - torch.arange(width)).clamp(min=0).float()
