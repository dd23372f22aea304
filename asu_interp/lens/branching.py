"""Many edits of one forward pass in one traversal: edited copies join a growing batch at the layer they edit.

    layer 0    [base]
    layer 1    [base | copies edited in layer 1]
    layer 2    [base | copies edited in layer 1 | copies edited in layer 2]
      ...

A copy is equal to the base up to its layer, so nothing before it is computed twice; and all copies of a layer share
its matrix products. One sequence at a time, so masks and positions are the same for every copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asu_interp.models import Model
from asu_interp.models.seams import Hook

log = logging.getLogger(__name__)

Edit = Callable[[Tensor], Tensor]  # the activation of the layer's own copies -> what it is to be


@dataclass(frozen=True)
class Branch:
    """`copies` copies of the base that part from it in `layer`, by edits at hook points of that layer's attention."""

    layer: int
    copies: int
    edits: tuple[tuple[str, Edit], ...]  # (hook point such as "hook_z", edit)


def branched_logits(
    model: Model,
    tokens: Int[Tensor, "pos"],
    branches: Sequence[Branch],
    reads: Sequence[int],
    *,
    max_rows: int = 512,
) -> Iterator[Float[Tensor, "copy read vocab"]]:
    """Logits of each branch's copies at the positions `reads`, branch by branch, in the order given.

    `max_rows` bounds the batch; branches beyond it go into another traversal. Branches must be sorted by layer.
    """
    for group in _groups(branches, max_rows):
        yield from _traverse(model, tokens, group, list(reads))


def _groups(branches: Sequence[Branch], max_rows: int) -> Iterator[list[Branch]]:
    group: list[Branch] = []
    for branch in branches:
        if group and sum(b.copies for b in group) + branch.copies > max_rows:
            yield group
            group = []
        group.append(branch)
    if group:
        yield group


def _traverse(model: Model, tokens: Tensor, group: list[Branch], reads: list[int]) -> Iterator[Tensor]:
    try:
        logits = _run(model, tokens, group, reads, grow=True)
    except RuntimeError as error:  # such as BLOOM, whose ALiBi tensor is made for one batch size
        log.info("copies are carried from layer 0, not from the edited layer on: %s", error)
        logits = _run(model, tokens, group, reads, grow=False)
    yield from logits[1:].split([branch.copies for branch in group])


def _run(
    model: Model, tokens: Tensor, group: list[Branch], reads: list[int], grow: bool
) -> Float[Tensor, "row read vocab"]:
    hooks: list[Hook] = [("unembed.hook_in", lambda hidden, hook: hidden[:, reads])]
    rows = 1
    joining: dict[int, int] = {}
    for branch in group:
        own = slice(rows, rows + branch.copies)
        hooks += [(f"blocks.{branch.layer}.attn.{point}", _on(own, edit)) for point, edit in branch.edits]
        joining[branch.layer] = joining.get(branch.layer, 0) + branch.copies
        rows = own.stop
    if grow:
        hooks += [(f"blocks.{layer}.hook_in", _join(copies)) for layer, copies in joining.items()]
    batch = tokens.to(model.device).expand(1 if grow else rows, -1)
    with model.evaluating(), model.bridge.hooks(fwd_hooks=hooks):
        return model.hf(batch, use_cache=False).logits


def _join(copies: int) -> Callable[..., Tensor]:
    def join(hidden: Float[Tensor, "row pos d"], hook: Any) -> Float[Tensor, "row_ pos d"]:
        return torch.cat([hidden, hidden[:1].expand(copies, *hidden.shape[1:])])

    return join


def _on(own: slice, edit: Edit) -> Callable[..., Tensor]:
    def hook_fn(activation: Tensor, hook: Any) -> Tensor:
        edited = activation.clone()
        edited[own] = edit(activation[own])
        return edited

    return hook_fn
