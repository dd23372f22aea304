"""What a frozen model says at the answer tokens: computed once per sample, then read from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from asu_interp.data.batches import Batch, Encoded, make_batch
from asu_interp.heads import HeadSet
from asu_interp.lens.temperature import Tau, smoothed
from asu_interp.models import Model


class Targets:
    """Log-probabilities of a frozen model at the answer tokens of given samples.

    A sample is run when it is first asked for and kept as long as `max_bytes` last; what does not fit is run again.
    """

    def __init__(
        self,
        logits: Callable[[Batch], Float[Tensor, "token vocab"]],
        encoded: Sequence[Encoded],
        pad_token: int,
        max_bytes: int = 2 << 30,
    ):
        self.logits, self.encoded, self.pad_token = logits, encoded, pad_token
        self.kept: dict[int, Float[Tensor, "token vocab"]] = {}
        self.room = max_bytes

    def __call__(self, index: Sequence[int]) -> Float[Tensor, "token vocab"]:
        """Log-probabilities, sample after sample in the order of `index`."""
        found = {i: self.kept[i] for i in index if i in self.kept}
        missing = [i for i in index if i not in found]
        if missing:
            batch = make_batch([self.encoded[i] for i in missing], self.pad_token)
            log_p = self.logits(batch).float().log_softmax(dim=-1)
            lengths = [len(self.encoded[i].answer) for i in missing]
            for i, rows in zip(missing, log_p.split(lengths), strict=True):
                found[i] = rows
                self._keep(i, rows)
        return torch.cat([found[i] for i in index])

    def _keep(self, i: int, rows: Tensor) -> None:
        size = rows.numel() * rows.element_size()
        if size <= self.room:
            self.kept[i] = rows.clone()  # a view would hold the whole batch
            self.room -= size


def frozen_logits(
    model: Model, tau: Tau | None = None, heads: HeadSet | None = None
) -> Callable[[Batch], Float[Tensor, "token vocab"]]:
    """The model's answer logits without gradient; with tau it is the forget-teacher (arXiv 2603.01285)."""

    def logits(batch: Batch) -> Float[Tensor, "token vocab"]:
        with model.evaluating():
            if tau is None:
                return model.answer_logits(batch)
            with smoothed(model, tau, heads):
                return model.answer_logits(batch)

    return logits
