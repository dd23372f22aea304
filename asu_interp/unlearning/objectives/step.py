"""What a loss sees in one training step, and the means that all losses share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from asu_interp.data.batches import Batch


@dataclass(frozen=True)
class Scored:
    """The student's logits at the answer tokens of a batch; nothing else of the sequence is ever unembedded."""

    batch: Batch
    logits: Float[Tensor, "token vocab"]

    def sample_mean(self, per_token: Float[Tensor, "token"]) -> Float[Tensor, ""]:
        """Mean over each answer's tokens, then over the samples: a long answer weighs no more than a short one."""
        lengths = self.batch.answer.sum(dim=1).to(per_token)
        rows = torch.zeros_like(lengths).index_add(0, self.batch.token_row.to(per_token.device), per_token)
        return (rows / lengths).mean()

    @property
    def nll(self) -> Float[Tensor, ""]:
        """Cross-entropy of the answers, nats per token."""
        targets = self.batch.targets.to(self.logits.device)
        return self.sample_mean(F.cross_entropy(_wide(self.logits), targets, reduction="none"))

    def kl_from(self, target: Float[Tensor, "token vocab"]) -> Float[Tensor, ""]:
        """KL(target || student) per answer token, `target` given as log-probabilities."""
        student = _wide(self.logits).log_softmax(dim=-1)
        return self.sample_mean(F.kl_div(student, target, log_target=True, reduction="none").sum(dim=-1))


def _wide(logits: Tensor) -> Tensor:
    """At least float32: half precision is too coarse for a log-softmax over a vocabulary."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Step:
    """Forget and retain samples scored by the student, and what the frozen models say at the same tokens."""

    forget: Scored
    retain: Scored
    teacher: Callable[[], Float[Tensor, "token vocab"]]  # log-probabilities of the forget-teacher on `forget`
    reference: Callable[[], Float[Tensor, "token vocab"]]  # log-probabilities of theta_0 on `retain`


class Losses(NamedTuple):
    """The two terms of every method; the trainer adds them as weight * forget + retain."""

    forget: Float[Tensor, ""]
    retain: Float[Tensor, ""]
