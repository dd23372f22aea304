"""Which heads carry a fact: head outputs patched between its prompt and one about another subject.

Run the model on a prompt about another subject (corrupted) and put in, for one head, the output that it has on the
fact's own prompt (clean). If the answer comes back, that head carries what the two prompts differ in: this is
*denoising*. *Noising* is the reverse: the head's corrupted output in the clean run, and the answer goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asu_interp.data.facts import Fact
from asu_interp.errors import FactsError
from asu_interp.heads import HeadSet
from asu_interp.intervals import Mean, bootstrap_mean
from asu_interp.lens.branching import Branch, branched_logits
from asu_interp.models import Model

Direction = Literal["denoising", "noising"]
MIN_DIFFERENCE = 0.1  # below it, the two runs hardly differ and the normalised score means nothing


@dataclass(frozen=True)
class Pair:
    """Two prompts of equal token length that differ in the subject, and the first token of each one's target."""

    fact: Fact
    other: Fact
    clean: Int[Tensor, "pos"]
    corrupted: Int[Tensor, "pos"]
    clean_target: int
    corrupted_target: int

    def metric(self, logits: Float[Tensor, "... vocab"]) -> Float[Tensor, "..."]:
        """Logit difference: the fact's target minus the other's."""
        return logits[..., self.clean_target] - logits[..., self.corrupted_target]


@dataclass(frozen=True)
class HeadScores:
    """Normalised patching score of every head: 1 restores (noising: destroys) the whole logit difference, 0 nothing."""

    per_pair: Float[Tensor, "pair layer head"]
    pairs: tuple[tuple[str, str], ...]  # (prompt, other subject)
    direction: Direction
    left_out: tuple[str, ...]  # clean and corrupted run hardly differ
    unaligned: tuple[str, ...]  # no partner of the same token length

    @property
    def scores(self) -> Float[Tensor, "layer head"]:
        return self.per_pair.mean(dim=0)

    def interval(self, layer: int, head: int, seed: int = 0) -> Mean:
        """Mean over pairs with its bootstrap interval."""
        return bootstrap_mean(self.per_pair[:, layer, head].numpy(), seed=seed)

    def top(self, k: int) -> HeadSet:
        """The k heads with the highest mean score."""
        return HeadSet.top(self.scores, k, f"top {k} by {self.direction}")

    def to_dict(self) -> dict[str, Any]:
        low, high = (
            [[getattr(self.interval(layer, head), end) for head in range(self.scores.shape[1])]
             for layer in range(self.scores.shape[0])]
            for end in ("low", "high")
        )  # fmt: skip
        return {
            "direction": self.direction,
            "n_pairs": len(self.pairs),
            "pairs": [list(pair) for pair in self.pairs],
            "left_out": list(self.left_out),
            "unaligned": list(self.unaligned),
            "scores": self.scores.tolist(),
            "low": low,
            "high": high,
        }


def locate_heads(
    model: Model,
    facts: Sequence[Fact],
    *,
    partners: Sequence[Fact] | None = None,
    max_pairs: int | None = None,
    direction: Direction = "denoising",
    max_rows: int = 512,
) -> HeadScores:
    """Patch every head's output, over all positions, for every fact that can be paired; scores [layer, head].

    Score: denoising (patched - corrupted) / (clean - corrupted), noising (clean - patched) / (clean - corrupted).
    A partner (from `partners`, else from the facts themselves) shares the relation and has a subject of the same
    token length. Raises FactsError if no pair is left.
    """
    pairs, unaligned = make_pairs(model, facts, partners if partners is not None else facts)
    scores: list[Tensor] = []
    kept: list[tuple[str, str]] = []
    left_out: list[str] = []
    for pair in pairs:
        if max_pairs is not None and len(kept) == max_pairs:
            break
        score = _patch_pair(model, pair, direction, max_rows)
        if score is None:
            left_out.append(pair.fact.prompt)
        else:
            scores.append(score)
            kept.append((pair.fact.prompt, pair.other.subject))
    if not scores:
        raise FactsError(
            f"no pair to patch between: {len(unaligned)} facts without a partner of the same token length, "
            f"{len(left_out)} whose clean and corrupted runs hardly differ"
        )
    return HeadScores(torch.stack(scores), tuple(kept), direction, tuple(left_out), tuple(unaligned))


def make_pairs(model: Model, facts: Sequence[Fact], partners: Sequence[Fact]) -> tuple[list[Pair], list[str]]:
    """Each fact with the first partner it aligns with, and the reasons why others have none."""
    pairs, unaligned = [], []
    for i, fact in enumerate(facts):
        # start the search behind the fact itself, so that the partners vary
        candidates = [other for other in (*partners[i + 1 :], *partners[: i + 1]) if _comparable(fact, other)]
        pair = next(filter(None, (_align(model, fact, other) for other in candidates)), None)
        if pair is not None:
            pairs.append(pair)
        else:
            why = "no other subject of this relation" if not candidates else "none of the same token length"
            unaligned.append(f"{fact.prompt}: {why}")
    return pairs, unaligned


def _comparable(fact: Fact, other: Fact) -> bool:
    return (
        fact.relation == other.relation
        and fact.target != other.target
        and bool(fact.subject and other.subject)
        and fact.subject != other.subject
        and fact.subject in fact.prompt
    )


def _align(model: Model, fact: Fact, other: Fact) -> Pair | None:
    def swap(text: str) -> str:
        return text.replace(fact.subject, other.subject)

    clean = model.encode_cue(fact.prompt, fact.stem)
    corrupted = model.encode_cue(swap(fact.prompt), swap(fact.stem))
    targets = [_first_target_token(model, f) for f in (fact, other)]
    if len(clean) != len(corrupted) or targets[0] == targets[1]:
        return None
    return Pair(fact, other, torch.tensor(clean), torch.tensor(corrupted), *targets)


def _first_target_token(model: Model, fact: Fact) -> int:
    """The token right after the stem in the whole answer."""
    _, stem = model.encode(fact.prompt, fact.stem, end=False)
    _, answer = model.encode(fact.prompt, fact.answer, end=False)
    return answer[len(stem)]


def _patch_pair(model: Model, pair: Pair, direction: Direction, max_rows: int) -> Tensor | None:
    clean, corrupted = (pair.metric(_logits(model, tokens)) for tokens in (pair.clean, pair.corrupted))
    if abs(clean - corrupted) < MIN_DIFFERENCE:
        return None
    denoise = direction == "denoising"
    base, source = (pair.corrupted, pair.clean) if denoise else (pair.clean, pair.corrupted)
    outputs = head_outputs(model, source)
    branches = [_patch_each_head(layer, outputs[layer]) for layer in range(model.n_layers)]
    logits = branched_logits(model, base, branches, [len(base) - 1], max_rows=max_rows)
    patched = torch.stack([pair.metric(rows[:, 0]).float().cpu() for rows in logits])
    change = patched - corrupted if denoise else clean - patched
    return change / (clean - corrupted)


def _patch_each_head(layer: int, output: Float[Tensor, "pos head d_head"]) -> Branch:
    """Copy h gets the other run's output of head h, over all positions."""
    heads = torch.arange(output.shape[1])

    def patch(z: Float[Tensor, "copy pos head d_head"]) -> Float[Tensor, "copy pos head d_head"]:
        z = z.clone()
        z[heads, :, heads] = output.transpose(0, 1)
        return z

    return Branch(layer, len(heads), (("hook_z", patch),))


def head_outputs(model: Model, tokens: Int[Tensor, "pos"]) -> list[Float[Tensor, "pos head d_head"]]:
    """Every head's output before W_O, layer by layer."""
    outputs: list[Tensor] = [torch.empty(0)] * model.n_layers

    def keep(layer: int) -> Any:
        def hook_fn(z: Float[Tensor, "1 pos head d_head"], hook: Any) -> None:
            outputs[layer] = z[0].clone()

        return hook_fn

    hooks = [(f"blocks.{layer}.attn.hook_z", keep(layer)) for layer in range(model.n_layers)]
    with model.evaluating(), model.bridge.hooks(fwd_hooks=hooks):
        model.hf(tokens.to(model.device)[None], use_cache=False)
    return outputs


def _logits(model: Model, tokens: Int[Tensor, "pos"]) -> Float[Tensor, "vocab"]:
    with model.evaluating():
        return model.hf(tokens.to(model.device)[None], use_cache=False).logits[0, -1].float().cpu()
