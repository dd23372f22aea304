"""Attention read at chosen query positions, without keeping the [layer, head, query, key] tensor of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asu_interp.data.batches import Batch, batches, encode_facts
from asu_interp.data.facts import Fact
from asu_interp.models import Model
from asu_interp.models.seams import Hook

Rows = Float[Tensor, "token head key"]


def pattern_hooks(model: Model, positions: Bool[Tensor, "row pos"], visit: Callable[[int, Rows], None]) -> list[Hook]:
    """Hooks that hand `visit(layer, rows)` the attention rows of the chosen query positions, row by row."""

    def reader(layer: int) -> Callable[..., None]:
        def read(pattern: Float[Tensor, "batch head query key"], hook: Any) -> None:
            visit(layer, pattern.transpose(1, 2)[positions].float())

        return read

    return [(f"blocks.{layer}.attn.hook_pattern", reader(layer)) for layer in range(model.n_layers)]


def visit_attention(
    model: Model, batch: Batch, positions: Bool[Tensor, "row pos"], visit: Callable[[int, Rows], None]
) -> None:
    """One forward pass; `visit(layer, rows)` is called layer after layer. Nothing is unembedded."""
    batch = batch.to(model.device)
    hooks: list[Hook] = [
        *pattern_hooks(model, positions.to(model.device), visit),
        ("unembed.hook_in", lambda hidden, hook: hidden[:1, :1]),
    ]
    with model.evaluating(), model.bridge.hooks(fwd_hooks=hooks):
        model.hf(batch.tokens, attention_mask=batch.attention_mask, use_cache=False)


def attention_entropy(model: Model, facts: Sequence[Fact], *, batch_size: int = 16) -> Float[Tensor, "layer head"]:
    """Mean entropy, in nats, of the attention rows that predict answer tokens (arXiv 2603.01285)."""
    total = torch.zeros(model.n_layers, model.n_heads)
    count = 0

    def add(layer: int, rows: Rows) -> None:
        total[layer] += row_entropy(rows).sum(dim=0).cpu()

    for batch in batches(encode_facts(model, facts), model.pad_token, batch_size):
        visit_attention(model, batch, batch.reads, add)
        count += int(batch.answer.sum())
    return total / count


def row_entropy(rows: Float[Tensor, "... key"]) -> Float[Tensor, "..."]:
    """-sum_s A[s] log A[s] over the last axis, in nats; 0 log 0 = 0."""
    return torch.special.entr(rows).sum(dim=-1)
