"""Attention temperature: A[l,h] = softmax(S[l,h] / tau[l,h]) on any set of heads (arXiv 2603.01285)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from asu_interp.errors import TemperatureError
from asu_interp.heads import HeadSet
from asu_interp.models import Model
from asu_interp.models.seams import temperature_hooks

Tau = float | int | Float[Tensor, "layer"] | Float[Tensor, "layer head"] | Float[Tensor, "row layer head"]


@contextmanager
def smoothed(model: Model, tau: Tau, heads: HeadSet | None = None) -> Iterator[Float[Tensor, "... layer head"]]:
    """Within the block the chosen heads (None: all) attend at temperature tau; afterwards nothing is left of it.

    tau: a number, one per layer, a [layer, head] table, or [row, layer, head] for a batch whose rows differ. Heads
    outside the set have tau = 1, which is the identity to the last bit. Yields the table in force. Raises
    TemperatureError, HeadError, and ModelError for a model whose attention cannot be edited.
    """
    table = temperature_table(model, tau, heads)
    with model.bridge.hooks(fwd_hooks=temperature_hooks(model.bridge, table, model.seam)):
        yield table


def temperature_table(model: Model, tau: Tau, heads: HeadSet | None = None) -> Float[Tensor, "... layer head"]:
    """tau spread over [..., layer, head], with 1 outside the chosen heads. Raises TemperatureError, HeadError."""
    shape = (model.n_layers, model.n_heads)
    given = torch.as_tensor(tau, dtype=torch.float32, device=model.device)
    if given.ndim == 1:
        given = given[:, None]
    if given.ndim > 3 or (given.ndim and (given.shape[-2] != shape[0] or given.shape[-1] not in (1, shape[1]))):
        raise TemperatureError(
            f"tau has shape {tuple(torch.as_tensor(tau).shape)}; allowed are a number, [{shape[0]}] (layers), "
            f"[{shape[0]}, {shape[1]}] (layers, heads), or [rows, {shape[0]}, {shape[1]}]"
        )
    bad = given.detach()[~(torch.isfinite(given.detach()) & (given.detach() > 0))]
    if bad.numel():
        raise TemperatureError(f"tau = {bad[0].item()}: a temperature is finite and greater than 0")
    table = given.expand(*given.shape[:-2], *shape)
    if heads is None:
        return table
    return torch.where(heads.require(model).mask.to(table.device), table, torch.ones_like(table))
